"""Opens the checkpoint folder and the JPEGs of requests that every benchmark uses, and runs snapcap's commands."""

import argparse
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapcap.service.config.reader import BUILD_GROUPS, BUILD_WITHOUT, add_arguments

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
SAMPLES = DEMO / "samples"
# All but the first are in `random_checkpoint.py`, which imports transformers.
MODELS = (
    *("demo", "vit-b16-gpt2", "blip-base", "git-base", "florence2-base"),
    *("smolvlm-256m", "llava-llama3-8b", "qwen3-vl-2b"),
)
NEW_TOKENS = 20  # the length of each caption of random weights
JPEG_SIZE = (500, 375)
FIRST_IMAGE = "pair-1.jpg"
JPEG_QUALITY = 90
_CAPTIONS = "captions.json"


def samples() -> dict[str, tuple[bytes, str]]:
    """Returns the shipped sample images, each with the caption that it must get."""
    captions: dict[str, str] = json.loads((SAMPLES / "captions.json").read_text())
    return {name: ((SAMPLES / name).read_bytes(), caption) for name, caption in sorted(captions.items())}


def environment(**extra: str) -> dict[str, str]:
    """Returns this process's environment without variables that would change a measurement.

    Snapcap's own variables are removed. The variable that keeps Python from writing byte code is removed too,
    because installed packages have byte code, and otherwise each start would compile a hundred modules again.
    """
    unwanted = ("SNAPCAP_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return {**kept, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **extra}


def fresh_caches(folder: Path) -> dict[str, str]:
    """Returns variables that put every compiler's cache, and temporary files, into an empty folder."""
    names = ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    variables = {name: str(folder / name.lower()) for name in names}
    for path in variables.values():
        Path(path).mkdir(parents=True)
    return variables


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# Options of an eager server, which would otherwise prepare weights for its next start during the measurement.
UNPREPARED = ("--no-prepared-weights",)


def serve_command(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "snapcap", "serve", "--host", "127.0.0.1", *options)


def run_module(module: str, *arguments: str, extra: Mapping[str, str] | None = None) -> None:
    """Runs a program and waits for it. Its messages are shown.

    Raises:
        RuntimeError: the program failed.
    """
    command, environ = [sys.executable, "-m", module, *arguments], environment(**(extra or {}))
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:4])} ended with status {done.returncode}")


def build_store(cache: Path, *options: str, extra: Mapping[str, str] | None = None) -> None:
    """Runs `snapcap build` into the store of a cache folder, which does nothing if the artifact set exists.
    Options that only a server has are left out."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser, BUILD_GROUPS, without=BUILD_WITHOUT)
    _, of_servers = parser.parse_known_args(options)
    kept = [each for each in options if each not in of_servers]
    run_module("snapcap", "build", "--cache-dir", str(cache), *kept, extra=extra)


@contextlib.contextmanager
def scratch(given: Path | None = None) -> Iterator[Path]:
    """Yields the given folder, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="snapcap-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@dataclass(frozen=True)
class Workload:
    """A checkpoint, and images for requests.

    folder: the checkpoint.
    images: folder of JPEGs, each with the caption that it must get. The caption of random weights is None.
    tokens: number of tokens of each caption of random weights. None for a trained model.
    """

    name: str
    folder: Path
    images: Path
    tokens: int | None

    def check(self, reply: Mapping[str, Any]) -> None:
        """Checks a reply to the first image, because a fast but wrong caption is no result.

        Raises:
            RuntimeError: the caption is wrong.
        """
        caption = json.loads((self.images / _CAPTIONS).read_text())[FIRST_IMAGE]
        tokens = reply.get("tokens", self.tokens)
        if (caption is not None and reply["caption"] != caption) or (self.tokens not in (None, tokens)):
            raise RuntimeError(f"a wrong caption: {reply}")


def read_images(folder: Path) -> list[tuple[bytes, str | None]]:
    """Returns the images of a workload with their captions."""
    captions: dict[str, str | None] = json.loads((folder / _CAPTIONS).read_text())
    return [((folder / name).read_bytes(), caption) for name, caption in captions.items()]


def open_workload(name: str, cache: Path) -> Workload:
    """Opens ``demo``, or a model of random weights. The images, and the first time random weights, are written to
    ``cache``."""
    images, captions = cache / "images" / name, {}
    images.mkdir(parents=True, exist_ok=True)
    for png, (data, caption) in samples().items():
        jpeg = png.replace(".png", ".jpg")
        (images / jpeg).write_bytes(_jpeg(data))
        captions[jpeg] = caption if name == "demo" else None
    (images / _CAPTIONS).write_text(json.dumps(captions))
    if name == "demo":
        return Workload(name, DEMO, images, None)
    folder = cache / "models" / name
    if not folder.is_dir():
        run_module("snapcap.benchmarks.harness.random_checkpoint", name, str(folder))
    return Workload(name, folder, images, NEW_TOKENS)


def _jpeg(png: bytes) -> bytes:
    """Returns a sample as a JPEG of the size of a usual photograph on the web: 12 to 50 KB. The demo model
    captions it rightly."""
    from PIL import Image

    stream = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB").resize(JPEG_SIZE, Image.Resampling.LANCZOS)
    picture.save(stream, "JPEG", quality=JPEG_QUALITY)
    return stream.getvalue()
