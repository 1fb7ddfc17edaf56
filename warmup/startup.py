"""The start: what overlaps what, from a bare process to a warm runner.

    main thread    import torch ──┐
    fetch thread   fetch weights ─┴─ device ─ weights ─ warm each bucket ─ self-test ─ ready

Nothing here imports torch before `import_torch`, so a server that has bound its port answers meanwhile.
"""

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from warmup.checkpoint import resolve_checkpoint
from warmup.options import StartOptions
from warmup.status import StartupStatus
from warmup.timeline import Timeline

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.preprocess import ImageTransform
    from models.tokenizer import Tokenizer
    from warmup.runner import Runner


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on local disk, with everything read but its weights."""

    name: str
    folder: Path
    config: "ModelConfig"
    tokenizer: "Tokenizer"
    transform: "ImageTransform"


@dataclass(frozen=True)
class Loaded:
    """What serves: a warm runner, and what stands before and after it."""

    checkpoint: Checkpoint
    runner: "Runner"


def load(options: StartOptions, timeline: Timeline, status: StartupStatus) -> Loaded:
    """Run the start on the calling thread, which becomes the device thread.

    Raises:
        CheckpointError, ConfigError, WeightsError, TokenizerError: the model cannot be served.
        StartError: the device or a setting does not fit.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="snapcap-fetch") as pool:
        fetching = pool.submit(fetch, options, timeline)
        with timeline.phase("import_torch"):
            importlib.import_module("torch")
        checkpoint = fetching.result()

    from warmup.loading import warm_runner  # noqa: PLC0415  imports torch

    return Loaded(checkpoint, warm_runner(checkpoint, options, timeline, status))


def fetch(options: StartOptions, timeline: Timeline) -> Checkpoint:
    """Bring the checkpoint's files to this machine and read all but the weights; needs no torch."""
    with timeline.phase("fetch_weights"):
        folder = resolve_checkpoint(options.model, options.cache_dir, options.s3)
        # Here and not above: numpy and Pillow, which a server must not wait for before it listens.
        from models.config import ModelConfig  # noqa: PLC0415
        from models.preprocess import ImageTransform  # noqa: PLC0415
        from models.tokenizer import Tokenizer  # noqa: PLC0415

        config = ModelConfig.from_folder(folder)
        return Checkpoint(
            name=options.model,
            folder=folder,
            config=config,
            tokenizer=Tokenizer.from_folder(folder),
            transform=ImageTransform.from_folder(folder, config.vision.image_size, options.max_pixels),
        )
