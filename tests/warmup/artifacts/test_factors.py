"""Factors: this machine as torch sees it, and nothing that ties an artifact to a host or a folder."""

import ast
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snapcap.warmup.artifacts import key
from snapcap.warmup.artifacts.key import (
    ABSENT,
    Difference,
    artifact_key,
    build_factors,
    is_stale,
    machine_factors,
    region_source_hash,
)
from snapcap.warmup.machine import capacity
from snapcap.warmup.machine.capacity import instruction_set
from snapcap.warmup.machine.cuda_driver import CudaDevice
from snapcap.warmup.machine.installation import MachineError, resolve_device

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "models"
ROOMS = ("layers", "kernels", "regions")  # the sources of what is compiled, beside `dimensions.py`


def test_factors_are_what_torch_says() -> None:
    import torch

    found = machine_factors("cpu")
    assert found["torch.version"] == str(torch.__version__)
    assert found["torch.git_version"] == torch.version.git_version
    assert found["torch.cuda"] == torch.version.cuda
    assert found["device.type"] == "cpu"


def test_nothing_of_torch_is_imported() -> None:
    code = (
        "import sys; from snapcap.warmup.artifacts.key import machine_factors; machine_factors('cpu');"
        "sys.exit(bool({'torch', 'boto3', 'cryptography', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_path_host_or_user_is_a_factor() -> None:
    text = str(machine_factors("cpu") | {"source.regions": region_source_hash("cpu")})
    for secret in (str(ROOT), str(Path.home()), platform.node(), sys.prefix, str(os.getpid())):
        assert len(secret) < 3 or secret not in text


def test_the_key_is_the_same_in_another_process_and_folder(tmp_path: Path) -> None:
    code = (
        "from snapcap.warmup.artifacts.key import *; from snapcap.warmup.artifacts.key import artifact_key\n"
        "cpu = machine_factors('cpu')\n"
        "print(artifact_key(build_factors(cpu, 'aot', {'buckets': (1, 4)}, {'mode': 'default'})))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "HOME": str(tmp_path)}
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    here = build_factors(machine_factors("cpu"), "aot", {"buckets": (1, 4)}, {"mode": "default"})
    assert other.stdout.strip() == artifact_key(here)


def test_nested_values_become_dotted_names() -> None:
    built = build_factors(
        {"torch.version": "2"}, "aot", {"vision": {"size": (2, 3)}, "dtype": "float32"}, {"tf32": False}
    )
    assert built["model.vision.size"] == [2, 3]
    assert built["model.dtype"] == "float32"
    assert built["compile.tf32"] is False
    assert built["torch.version"] == "2"
    assert built["kind"] == "aot"
    assert not {"python", "compiler"} & built.keys()


def test_artifacts_of_jit_also_know_python_and_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_factors({}, "jit", {}, {})
    assert built["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "g++" in str(built["compiler"]) or "clang" in str(built["compiler"])
    for none in ("no-such-compiler", "false"):
        monkeypatch.setenv("CXX", none)
        assert build_factors({}, "jit", {}, {})["compiler"] is None


def test_regions_import_nothing_of_ours_that_the_key_does_not_hash() -> None:
    """Except code that reads the configuration, whose results reach a region as dimensions, which are factors; the
    type of a buffer, whose shape and strides each package records; the names of a checkpoint's tensors, whose
    numbers are a region's inputs; and the way a dataclass is made."""
    names = ("config", "dataclass", "dimensions", "errors", "memory.memory", "names", "text")
    allowed = {f"snapcap.models.{name}" for name in names}
    rooms = tuple(f"snapcap.models.{room}" for room in ROOMS)
    for file in (file for room in ROOMS for file in (MODELS / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snapcap."):
                ours = str(node.module).startswith(rooms) or node.module in allowed
                assert ours, (file, node.module)
            assert not isinstance(node, ast.Import) or "snapcap" not in {alias.name[:7] for alias in node.names}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A copy of the sources that decide what is compiled."""
    folder = tmp_path / "models"
    for room in ROOMS:
        shutil.copytree(MODELS / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(MODELS / "dimensions.py", folder)
    return folder


def test_the_source_hash_is_of_code(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = region_source_hash("cpu")
    monkeypatch.setattr(key, "package_folder", lambda _: models)
    assert region_source_hash("cpu") == first
    file = models / "layers" / "vit.py"
    source = file.read_text()
    for same in (source.replace("\n", "\r\n"), "# Why.\n\n" + source, source.replace('"""', '"""More. ', 1)):
        file.write_bytes(same.encode())
        assert region_source_hash("cpu") == first
    file.write_text(source + "x = 1\n")
    assert region_source_hash("cpu") != first


@pytest.mark.parametrize(
    ("name", "stale"),
    [
        ("kernels/head.py", {"cuda"}),
        ("layers/linear.py", {"cpu", "cuda"}),
        ("dimensions.py", {"cpu", "cuda"}),  # which has the most beams and phrases that regions are built for
    ],
)
def test_code_makes_artifacts_stale_that_were_compiled_from_it(
    models: Path, name: str, stale: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "package_folder", lambda _: models)
    before = {device: region_source_hash(device) for device in ("cpu", "cuda")}
    with (models / name).open("a") as file:
        file.write("x = 1\n")
    assert {device for device, first in before.items() if region_source_hash(device) != first} == stale


def test_cuda_devices_are_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def device(index: int) -> CudaDevice:
        asked.append(index)
        return CudaDevice("NVIDIA H100 80GB HBM3", "9.0", 132)

    monkeypatch.setattr(key, "cuda_device", device)
    found = machine_factors("cuda:2")
    assert asked == [2]
    assert found["device.type"] == "cuda"
    assert found["device.name"] == "NVIDIA H100 80GB HBM3"
    assert found["device.compute_capability"] == "9.0"
    assert found["device.multiprocessors"] == 132
    assert artifact_key(found) == artifact_key(machine_factors("cuda"))  # one kind of device, one key


def test_auto_is_the_device_that_torch_would_choose() -> None:
    import torch

    assert resolve_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MachineError, match="--device cpu"):
        machine_factors("cuda:99")


def test_isa_is_read_from_both_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(capacity, "CPUINFO", cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 rdrand hypervisor fma avx512f xsave bmi2\nbugs\t: avx\n")
    assert instruction_set() == ["avx2", "avx512f", "bmi2", "fma"]
    cpuinfo.write_text("processor : 0\nFeatures\t: fp asimd sve cpuid evtstrm sb\n")
    assert instruction_set() == ["asimd", "fp", "sve"]
    cpuinfo.unlink()
    assert instruction_set()


def test_stale_is_other_software_only() -> None:
    torch, source = Difference("torch.version", "2", "1"), Difference("source.regions", "a", "b")
    device, model = Difference("device.name", "a", "b"), Difference("model.dtype", "a", ABSENT)
    assert is_stale([torch, source])
    assert not is_stale([torch, device])
    assert not is_stale([model])
