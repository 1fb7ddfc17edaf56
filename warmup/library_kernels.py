"""Kernels of the vendor's libraries, brought to a GPU while packages are opened."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from models.fused import compiled_function
from warmup.buckets import Bucket
from warmup.child import one_line
from warmup.model import LoadedModel

_logger = logging.getLogger("snapcap.start")


@contextmanager
def loading_library_kernels(model: LoadedModel, buckets: Sequence[Bucket]) -> Iterator[None]:
    """Inside the block another thread runs one layer of the encoder at each bucket; on a CPU nothing does.

    CUDA loads a kernel when it is first launched. A package brings its own, but products and attention are the
    libraries', which choose another kernel for each bucket: on an H200 each bucket's first layer took 0.1 s, its
    second 1 ms. The time is the driver's, which needs no lock of Python's.
    """
    if model.state.tokens.device.type != "cuda":
        yield
        return
    thread = threading.Thread(target=run_encoder_blocks, args=(model, buckets), name="library-kernels", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()  # its products' handle and workspace are the next one's, and captures must be alone


def run_encoder_blocks(model: LoadedModel, buckets: Sequence[Bucket]) -> None:
    """One layer at each bucket, the largest first, as it is compiled. What comes of it nobody reads; a failure is
    the warm-up's to report."""
    region = model.regions.encoder_block
    function = compiled_function(region, model.state.tokens.device, model.dtype)
    try:
        with torch.no_grad():
            for bucket in reversed(buckets):
                function(*model.inputs(region, bucket))
            if model.state.tokens.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
    except RuntimeError as error:
        _logger.warning("library kernels not loaded", extra={"fields": {"error": one_line(error)}})
