"""Opens what is served and asked in every benchmark: a checkpoint folder, and JPEGs as clients send them."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapcap.benchmarks.harness.common import DEMO, ROOT, environment, samples
from snapcap.benchmarks.harness.random_checkpoint import NEW_TOKENS, RANDOM_MODELS
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions

if TYPE_CHECKING:
    from snapcap.warmup.plan.checkpoint import Checkpoint
    from snapcap.warmup.plan.plan import Plan
    from snapcap.warmup.runtime.loaded_model import LoadedModel

MODELS = ("demo", *RANDOM_MODELS)
JPEG_SIZE = (500, 375)
FIRST_IMAGE = "pair-1.jpg"
JPEG_QUALITY = 90
_CAPTIONS = "captions.json"


@dataclass(frozen=True)
class Workload:
    """``folder`` is the checkpoint; ``images`` maps a name to a JPEG and the caption it must get.

    ``tokens`` is how many each caption has where that is fixed; then no caption is known: the weights are random.
    """

    name: str
    folder: Path
    images: Mapping[str, tuple[bytes, str | None]]
    tokens: int | None

    @property
    def first_image(self) -> tuple[bytes, str | None]:
        return self.images[FIRST_IMAGE]

    def check(self, reply: Mapping[str, Any]) -> None:
        """Whether a reply to the first image is right; one that was fast and wrong is no result.

        Raises:
            RuntimeError: it is not.
        """
        _, caption = self.first_image
        tokens = reply.get("tokens", self.tokens)
        if (caption is not None and reply["caption"] != caption) or (self.tokens not in (None, tokens)):
            raise RuntimeError(f"a wrong caption: {reply}")

    def write_images(self, folder: Path) -> Path:
        """The images as files, for load generators in processes of their own."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, (data, _) in self.images.items():
            (folder / name).write_bytes(data)
        (folder / _CAPTIONS).write_text(json.dumps({name: caption for name, (_, caption) in self.images.items()}))
        return folder


def read_images(folder: Path) -> list[tuple[bytes, str | None]]:
    """What ``write_images`` wrote."""
    captions: dict[str, str | None] = json.loads((folder / _CAPTIONS).read_text())
    return [((folder / name).read_bytes(), caption) for name, caption in captions.items()]


def open_workload(name: str, cache: Path) -> Workload:
    """``demo``, or one of random weights, which is made in ``cache`` the first time."""
    jpegs = {png.replace(".png", ".jpg"): (_jpeg(data), caption) for png, (data, caption) in samples().items()}
    if name == "demo":
        return Workload(name, DEMO, jpegs, None)
    folder = cache / "models" / name
    if not folder.is_dir():
        command = [sys.executable, "-m", "snapcap.benchmarks.harness.random_checkpoint", name, str(folder)]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    images = {name: (data, None) for name, (data, _) in jpegs.items()}
    return Workload(name, folder, images, NEW_TOKENS)


def start_options(model: Path, cache: Path, **compute: Any) -> StartOptions:
    """As `snapcap serve` has them, with the artifact store in ``cache``."""
    return StartOptions(ModelOptions(str(model), cache), ComputeOptions(**compute))


def open_model(
    options: StartOptions, mark: Callable[[str], object] = lambda _: None
) -> "tuple[Checkpoint, Plan, LoadedModel]":
    """A checkpoint on its device, as a start has it before anything is compiled. ``mark`` is told of each stretch
    that is over."""
    from snapcap.warmup.plan.plan import make_plan
    from snapcap.warmup.runtime.devices.torch_settings import open_device
    from snapcap.warmup.runtime.loaded_model import load_model
    from snapcap.warmup.start.preparation import read_checkpoint

    checkpoint = read_checkpoint(options)
    plan = make_plan(checkpoint.config, options)
    mark("checkpoint")
    device, dtype = open_device(plan)
    mark("device_init")
    model = load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, device, dtype)
    mark("load_weights")
    return checkpoint, plan, model


def _jpeg(png: bytes) -> bytes:
    """A sample at the size of a usual photograph on the web: 12 to 50 KB. The demo model captions it rightly."""
    from PIL import Image

    stream = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB").resize(JPEG_SIZE, Image.Resampling.LANCZOS)
    picture.save(stream, "JPEG", quality=JPEG_QUALITY)
    return stream.getvalue()
