"""Decodes images on threads of the test, in place of a server's decode processes."""

import asyncio
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from snapcap.models.processing.image_formats import ImageError
from snapcap.models.text import GenerationConfig
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.captioning.model_defaults import ModelDefaults
from snapcap.service.errors import DeadlineExceeded
from snapcap.service.images.decode import DecodedImage, EncodedImage, unreadable

# The configuration of a model that sets no defaults, and takes the tokens of every fake tokenizer.
PLAIN_CONFIG: Any = SimpleNamespace(
    family="",
    decoder=SimpleNamespace(vocab_size=1 << 20, text_tokens=0),
    generation=GenerationConfig(start_id=0, eos_ids=(), pad_id=0, max_length=20),
    chat=None,
    tasks=(),
)


class ThreadImageDecoder:
    """An `ImageDecoder` on the threads of a pool."""

    def __init__(self, pool: Executor, transform: Any) -> None:
        self._pool = pool
        self._transform = transform

    async def decode(self, encoded: EncodedImage) -> DecodedImage:
        future = self._pool.submit(self._run, encoded)
        if encoded.account is not None:  # the thread keeps the bytes, even if the request is cancelled before
            account = encoded.account.hold()
            future.add_done_callback(lambda _: account.release())
        return await asyncio.wrap_future(future)

    def _run(self, encoded: EncodedImage) -> DecodedImage:
        began = time.monotonic()
        if began >= encoded.deadline:
            raise DeadlineExceeded
        try:
            decoded = self._transform.decode(encoded.data, None)
        except ImageError as error:
            raise unreadable(error.reason, str(error)) from None
        return DecodedImage(decoded.pixels, decoded.format, began, time.monotonic() - began, decoded.size)


def attach(captioner: Captioner, engine: Any, transform: Any, tokenizer: Any = None, name: str = "fake") -> None:
    """Gives a captioner a model whose images threads decode. `tokenizer`: None keeps the present model's."""
    model: Any = captioner._model
    defaults = model.defaults if tokenizer is None else ModelDefaults(tokenizer, PLAIN_CONFIG)
    captioner.attach(
        engine, name, ThreadImageDecoder(ThreadPoolExecutor(2, thread_name_prefix="decode"), transform), defaults
    )
