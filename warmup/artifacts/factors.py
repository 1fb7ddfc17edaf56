"""Collects the factors of an artifact key: all that decides whether compiled code runs here, and nothing else.

All factors are known without importing torch, so that artifacts can be fetched while torch is being imported. No
path, host name or address is a factor, because each would keep equal machines from sharing artifacts.
"""

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from snapcap.warmup.artifacts.key import Difference, Factor, check_factors
from snapcap.warmup.artifacts.manifest import FORMAT
from snapcap.warmup.artifacts.source import source_digest
from snapcap.warmup.machine.capacity import instruction_set
from snapcap.warmup.machine.cuda_driver import CudaDriverError, cuda_device
from snapcap.warmup.machine.cxx import compiler_version
from snapcap.warmup.machine.installation import (
    MachineError,
    installed_version,
    package_folder,
    resolve_device,
    torch_version,
)
from snapcap.warmup.options import Kind

# Factors that change when the same machine is given other software.
_SOFTWARE = re.compile(r"(torch|triton|python|compiler|libc|source|format)(\..+)?")


def machine_factors(device: str) -> dict[str, Factor]:
    """Returns the versions of torch, triton and libc, and describes the CPU and the device of this machine.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: cuda where torch and the driver have it, else cpu.

    Raises:
        MachineError: torch is not installed, or the device is not there.
    """
    torch = torch_version()
    factors: dict[str, Factor] = {
        "torch.version": torch.version,
        "torch.git_version": torch.git_version,
        "torch.cuda": torch.cuda,
        "triton.version": installed_version("triton"),
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
        raise MachineError(f"device {device}: {error}; use --device cpu") from error
    return factors | {
        "device.type": "cuda",
        "device.name": found.name,
        "device.compute_capability": found.compute_capability,
        "device.multiprocessors": found.multiprocessors,
    }


def region_source_hash(device_type: object, models: Path | None = None) -> str:
    """Returns the SHA-256, in hex, of the code that is compiled: layers, kernels and regions, and the dimensions
    that they are built from. Comments and docstrings do not count.

    Code that reads a configuration is left out, because its results reach a region as dimensions, which are
    factors.

    Args:
        device_type: ``cuda`` or ``cpu``; the kernels of a GPU do not count for a CPU.
        models: the folder of our models, if it is not the installed one.
    """
    models = models or package_folder("snapcap.models")
    rooms = ("layers", "regions") if device_type == "cpu" else ("layers", "kernels", "regions")
    files = (file for room in rooms for file in (models / room).rglob("*.py"))
    return source_digest(models, [models / "dimensions.py", *files])


def build_factors(
    machine: Mapping[str, Factor], kind: Kind, model: Mapping[str, Any], compilation: Mapping[str, Any]
) -> dict[str, Factor]:
    """Returns all factors of a key, flat: ``{"vision": {"hidden_size": 48}}`` of the model is
    ``model.vision.hidden_size``.

    Args:
        machine: the result of ``machine_factors``.
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
        "source.regions": region_source_hash(machine.get("device.type")),
    }
    if kind == "aot" and factors.get("device.type") == "cpu":
        sources = package_folder("snapcap.warmup.runtime.aoti") / "cpp"
        factors["source.cpu_library"] = source_digest(
            sources, (file for file in sources.rglob("*") if file.suffix in (".cpp", ".h", ".txt"))
        )
    if kind == "jit":
        # Its artifacts are pickles of this Python, and torch finds them by this compiler. A package knows neither.
        factors["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        factors["compiler"] = compiler_version()
    return check_factors(factors)


def is_stale(differences: Iterable[Difference]) -> bool:
    """Returns True if the differences are of software alone, so that this machine may have made the artifacts
    before its software changed."""
    return all(_SOFTWARE.fullmatch(difference.name) for difference in differences)


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            flat |= _flat(dotted, value)
        else:
            flat[dotted] = list(value) if isinstance(value, tuple) else value
    return flat
