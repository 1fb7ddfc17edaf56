"""Opens the checkpoint folder and the JPEGs of requests that every benchmark uses."""

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
    from snapcap.warmup.runtime.torch_model import LoadedModel

MODELS = ("demo", *RANDOM_MODELS)
JPEG_SIZE = (500, 375)
FIRST_IMAGE = "pair-1.jpg"
JPEG_QUALITY = 90
_CAPTIONS = "captions.json"


@dataclass(frozen=True)
class Workload:
    """A checkpoint, and images for requests.

    folder: the checkpoint.
    images: by name, a JPEG and the caption that it must get. The caption of random weights is None.
    tokens: number of tokens of each caption of random weights. None for a trained model.
    """

    name: str
    folder: Path
    images: Mapping[str, tuple[bytes, str | None]]
    tokens: int | None

    @property
    def first_image(self) -> tuple[bytes, str | None]:
        return self.images[FIRST_IMAGE]

    def check(self, reply: Mapping[str, Any]) -> None:
        """Checks a reply to the first image, because a fast but wrong caption is no result.

        Raises:
            RuntimeError: the caption is wrong.
        """
        _, caption = self.first_image
        tokens = reply.get("tokens", self.tokens)
        if (caption is not None and reply["caption"] != caption) or (self.tokens not in (None, tokens)):
            raise RuntimeError(f"a wrong caption: {reply}")

    def write_images(self, folder: Path) -> Path:
        """Writes the images to files, for load generators in other processes."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, (data, _) in self.images.items():
            (folder / name).write_bytes(data)
        (folder / _CAPTIONS).write_text(json.dumps({name: caption for name, (_, caption) in self.images.items()}))
        return folder


def read_images(folder: Path) -> list[tuple[bytes, str | None]]:
    """Returns the images that ``write_images`` wrote."""
    captions: dict[str, str | None] = json.loads((folder / _CAPTIONS).read_text())
    return [((folder / name).read_bytes(), caption) for name, caption in captions.items()]


def open_workload(name: str, cache: Path) -> Workload:
    """Opens ``demo``, or a model of random weights, which is made in ``cache`` the first time."""
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
    """Returns the options of `snapcap serve`, with the artifact store in ``cache``."""
    return StartOptions(ModelOptions(str(model), cache), ComputeOptions(**compute))


def open_model(
    options: StartOptions, mark: Callable[[str], object] = lambda _: None
) -> "tuple[Checkpoint, Plan, LoadedModel]":
    """Returns a checkpoint on its device, as a start has it before anything is compiled. Calls ``mark`` after each
    phase."""
    from snapcap.warmup.plan.plan import make_plan
    from snapcap.warmup.runtime.torch_model import load_model, open_device
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
    """Returns a sample as a JPEG of the size of a usual photograph on the web: 12 to 50 KB. The demo model
    captions it rightly."""
    from PIL import Image

    stream = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB").resize(JPEG_SIZE, Image.Resampling.LANCZOS)
    picture.save(stream, "JPEG", quality=JPEG_QUALITY)
    return stream.getvalue()
