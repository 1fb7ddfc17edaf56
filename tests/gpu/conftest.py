"""Runs tests on a CUDA device: python -m pytest tests/gpu. Without one they are skipped, each by its name.

GPU_TESTS_DEVICE=cpu runs the same bodies on the CPU, so that only what CUDA itself does is left untested.
"""

import copy
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity import device_cases
from support.parity.device_cases import BUCKETS, FEW_BUCKETS, Captioner
from support.servers.device_starts import Background, servable

from snapcap.warmup.build.builder import Built
from snapcap.warmup.machine.capacity import available_cpus
from snapcap.warmup.runtime.aoti.torch_packages import torch_backend
from snapcap.warmup.runtime.model import Backend
from snapcap.warmup.runtime.torch_model import DTYPES, LoadedModel

FAMILIES = {
    "vit-gpt2": device_cases.vit_gpt2,
    "blip": device_cases.blip,
    "git": device_cases.git,
    "smolvlm": device_cases.smolvlm,
    "llava": device_cases.llava,
    "florence2": device_cases.florence2,
    "qwen3-vl": device_cases.qwen3_vl,
}
# As tests ask for them.
SETS = (
    ("vit-gpt2", "bfloat16"),
    ("vit-gpt2", "float16"),
    *((family, "bfloat16") for family in FAMILIES if family != "vit-gpt2"),
    *((family, "float32") for family in FAMILIES),
)
BUILDS_AT_ONCE = 3  # the last packages of one beside the first ones of another


@pytest.fixture(scope="session")
def device() -> torch.device:
    name = os.environ.get("GPU_TESTS_DEVICE", "cuda:0")
    if name != "cpu" and not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE HERE: NOTHING IS CHECKED ON A GPU")
    return torch.device(name)


@pytest.fixture(autouse=True)
def precise(device: torch.device) -> Iterator[None]:
    """No grad and no TF32, as a server sets it, and for transformers' convolutions too."""
    torch.set_float32_matmul_precision("highest")
    convolutions = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        yield
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.fixture(scope="session")
def captioners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Captioner]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in FAMILIES.items()}


class Packages:
    """Builds of several sets, all ``at_once`` or each when it is first asked for."""

    def __init__(self, captioners: dict[str, Captioner], device: torch.device, folder: Path, at_once: bool) -> None:
        self._pool = ThreadPoolExecutor(BUILDS_AT_ONCE)
        self._builds: dict[tuple[str, str], Future[Built]] = {}
        # Half of what a worker does is waiting for a disk or for the device.
        workers = max(1, available_cpus() // (2 if at_once else 1))
        self._builders = {
            (family, dtype): device_cases.build(
                captioners[family],
                device_cases.plan_of(device, dtype, FEW_BUCKETS if dtype == "float32" else BUCKETS[family]),
                folder / f"{family}-{dtype}",
                workers,
            )
            for family, dtype in SETS
        }
        if at_once:
            for key in self._builders:
                self._begin(key)

    def _begin(self, key: tuple[str, str]) -> None:
        self._builds[key] = self._pool.submit(self._builders[key].run)

    def _of(self, family: str, dtype: str) -> Built:
        """The set, once it is made and every package has passed its self-check."""
        if (family, dtype) not in self._builds:
            self._begin((family, dtype))
        built = self._builds[family, dtype].result()
        assert built.complete, built.failures
        assert not built.failures  # nor what only some requests need
        return built

    def backend(self, family: str, dtype: str, model: LoadedModel) -> Backend:
        """What opens the set for a model."""
        built = self._of(family, dtype)
        return torch_backend(built.files, built.input_specs, model)

    def stop(self) -> None:
        for builder in self._builders.values():
            builder.stop()
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def packages(
    captioners: dict[str, Captioner],
    device: torch.device,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Packages]:
    # Tests chosen with -k wait for what they ask for alone.
    at_once = device.type == "cuda" and not request.config.option.keyword
    made = Packages(captioners, device, tmp_path_factory.mktemp("packages"), at_once)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def references(captioners: dict[str, Captioner], device: torch.device) -> dict[tuple[str, str], Any]:
    """transformers' models in fp32 on the device, of weights rounded to each dtype."""
    return {
        (family, dtype): copy.deepcopy(captioner.model).to(DTYPES[dtype]).float().to(device)
        for family, captioner in captioners.items()
        for dtype in DTYPES
        if DTYPES[dtype].is_floating_point
    }


@pytest.fixture(scope="session")
def background(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device, samples: dict[Path, str]
) -> Background:
    return Background(tmp_path_factory.mktemp("starts"), device.type, samples)


@pytest.fixture
def built(background: Background) -> Path:
    """A cache folder with the demo model's artifacts and prepared weights for the device."""
    run = background.build.result()
    assert run.returncode == 0, run.stderr
    return background.built


@pytest.fixture
def served() -> None:
    if not servable():
        pytest.skip("FASTAPI, UVICORN OR PROMETHEUS_CLIENT IS NOT INSTALLED: NO SERVER IS STARTED ON THE GPU")
