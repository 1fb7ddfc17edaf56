"""The settings of the command line, as the warm-up takes them."""

from dataclasses import asdict

from service.config import Settings
from warmup.options import StartOptions
from warmup.s3 import S3Options


def start_options(settings: Settings) -> StartOptions:
    model, compute = settings.model, settings.compute
    return StartOptions(
        model=model.source,
        cache_dir=model.cache_dir,
        device=compute.device,
        dtype=compute.dtype,
        backend=compute.backend,
        buckets=compute.buckets,
        cache_length=model.cache_length,
        max_new_tokens=model.max_new_tokens,
        threads=compute.threads,
        max_pixels=settings.images.max_pixels,
        s3=S3Options(**asdict(settings.s3)),
    )
