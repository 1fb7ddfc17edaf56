"""Converts the settings of the command line into the options of the warm-up."""

from dataclasses import asdict
from pathlib import Path
from typing import cast

from snapcap.service.config.settings import Settings
from snapcap.warmup.options import (
    BackendChoice,
    BuildChoice,
    ReadyWhen,
    S3Options,
    StartOptions,
    StoreOptions,
)


def start_options(settings: Settings) -> StartOptions:
    model, compute, store = settings.model, settings.compute, settings.store
    return StartOptions(
        model=model.source,
        cache_dir=model.cache_dir,
        store=StoreOptions(
            local=model.cache_dir / "store",
            address=store.address,
            trusted_keys=store.trusted_keys or _public_half(store.sign_key),
            allow_unsigned=store.allow_unsigned,
            sign_key=store.sign_key,
            deadline=store.deadline,
        ),
        device=compute.device,
        dtype=compute.dtype,
        backend=cast("BackendChoice", compute.backend),
        encoder_mode=compute.encoder_mode,
        decoder_mode=compute.decoder_mode,
        buckets=compute.buckets,
        cache_length=model.cache_length,
        max_new_tokens=model.max_new_tokens,
        threads=compute.threads,
        ready_when=cast("ReadyWhen", compute.ready_when),
        strict=compute.strict,
        build=cast("BuildChoice", store.build),
        build_workers=store.build_workers,
        build_timeout=store.build_timeout,
        remote_cache=store.remote_cache,
        max_pixels=settings.images.max_pixels,
        s3=S3Options(**asdict(settings.s3)),
    )


def _public_half(sign_key: Path | None) -> tuple[Path, ...]:
    """Who signs accepts what he has signed: the public key that `snapcap keygen` writes beside the private one."""
    if sign_key is None:
        return ()
    public = sign_key.with_name(f"{sign_key.name}.pub")
    return (public,) if public.is_file() else ()
