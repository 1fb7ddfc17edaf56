"""The factors of an artifact key: everything that decides whether compiled code runs here, and nothing else.

Known without importing torch, so that artifacts can be fetched while torch is being imported. No path, host name
or address is a factor: they would keep equal machines from sharing.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from snapcap.warmup.cuda_driver import CudaDriverError, cuda_device, cuda_device_count
from snapcap.warmup.cxx import compiler_version
from snapcap.warmup.isa import instruction_set
from snapcap.warmup.key import Difference, Factor, check_factors
from snapcap.warmup.manifest import FORMAT, Kind

# Factors that change when the same machine is given other software.
_SOFTWARE = re.compile(r"(torch|triton|python|compiler|libc|source|format)(\..+)?")


class FactorsError(RuntimeError):
    """This machine's factors cannot be determined; one line that says what to do."""


def machine_factors(device: str) -> dict[str, Factor]:
    """torch, triton, libc, CPU and device of this machine.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: cuda where torch and the driver have it, else cpu.

    Raises:
        FactorsError: torch is not installed, or the device is not there.
    """
    factors: dict[str, Factor] = {
        **_torch_factors(),
        "triton.version": _installed_version("triton"),
        "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None,
        "cpu.arch": platform.machine(),
        # Also with a GPU: the host side of a package is compiled for this CPU.
        "cpu.isa": [*instruction_set()],
    }
    name, _, index = resolve_device(device).partition(":")
    if name == "cpu":
        return factors | {"device.type": "cpu"}
    try:
        found = cuda_device(int(index or 0))
    except CudaDriverError as error:
        raise FactorsError(f"device {device}: {error}; use --device cpu") from error
    return factors | {
        "device.type": "cuda",
        "device.name": found.name,
        "device.compute_capability": found.compute_capability,
        "device.multiprocessors": found.multiprocessors,
    }


def resolve_device(device: str) -> str:
    """``auto`` becomes ``cuda:0`` or ``cpu``; any other name stays as it is."""
    if device != "auto":
        return device
    return "cuda:0" if _torch_factors()["torch.cuda"] is not None and cuda_device_count() else "cpu"


def region_source_hash(regions: Path | None = None) -> str:
    """SHA-256, in hex, of the regions' sources with their names; line endings do not count.

    All that is compiled lies in one folder. What reads the configuration does not: what it decides reaches a region
    as a dimension, which is a factor. Nor does the sampling of eager steps.

    Args:
        regions: the folder, if it is not the installed one.
    """
    folder = regions or _package_folder("snapcap.models.regions")
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        source = file.read_bytes().replace(b"\r\n", b"\n")
        digest.update(b"%s %d\n%s" % (file.relative_to(folder).as_posix().encode(), len(source), source))
    return digest.hexdigest()


def build_factors(
    machine: Mapping[str, Factor], kind: Kind, model: Mapping[str, Any], compilation: Mapping[str, Any]
) -> dict[str, Factor]:
    """All factors of a key, flat: ``{"vision": {"hidden_size": 48}}`` of the model is
    ``model.vision.hidden_size``.

    Args:
        machine: what ``machine_factors`` found.
        model: dimensions, dtype, buckets and cache length; nested, as ``dataclasses.asdict`` gives it.
        compilation: modes, options and precision flags; nested or not.

    Raises:
        FactorError: a value is no JSON.
    """
    factors: dict[str, Any] = {
        **machine,
        **_flat("model", model),
        **_flat("compile", compilation),
        "format": FORMAT,
        "kind": kind,
        "source.regions": region_source_hash(),
    }
    if kind == "jit":
        # Its artifacts are pickles of this Python, and torch finds them by this compiler. A package knows neither.
        factors["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        factors["compiler"] = compiler_version()
    return check_factors(factors)


def is_stale(differences: Iterable[Difference]) -> bool:
    """Whether artifacts with these differences are what this machine had before its software changed."""
    return all(_SOFTWARE.fullmatch(difference.name) for difference in differences)


def _torch_factors() -> dict[str, Factor]:
    """Read from torch/version.py, which imports nothing of torch."""
    try:
        version = runpy.run_path(str(_package_folder("torch") / "version.py"))
        return {
            "torch.version": str(version["__version__"]),
            "torch.git_version": str(version["git_version"]),
            "torch.cuda": version["cuda"],
        }
    except (OSError, KeyError) as error:
        raise FactorsError("cannot read torch's version; is torch installed in this environment?") from error


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FactorsError(f"the package {package} is not installed in this environment")
    return Path(spec.submodule_search_locations[0])


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            flat |= _flat(dotted, value)
        else:
            flat[dotted] = list(value) if isinstance(value, tuple) else value
    return flat
