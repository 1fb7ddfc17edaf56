"""Computes the artifact key, a hash of named factors that decide whether compiled code runs on this machine.

Two machines with equal factors share one set of artifacts. All factors are known without importing torch, so that
artifacts can be fetched while torch is being imported. No path, host name or address is a factor, because each
would keep equal machines from sharing artifacts.

The digest of snapcap's sources covers code, but no comments and docstrings. Each start computes the digest, so a
regular expression removes them in 3 ms; `ast.parse` of the regions would take 60 ms, and its tree differs between
versions of Python.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.capacity import instruction_set
from snapcap.warmup.machine.cuda_driver import NO_GPU, CudaDriverError, cuda_device
from snapcap.warmup.machine.installation import (
    MachineError,
    compiler_version,
    installed_version,
    package_folder,
    resolve_device,
    torch_version,
)
from snapcap.warmup.options import Kind

Factor = str | int | float | bool | None | list["Factor"]
Factors = Mapping[str, Factor]

FORMAT = 1  # the format of manifests
ABSENT = "(absent)"
MAX_FACTORS = 256
MAX_DEPTH = 8  # levels of lists in lists
_MAX_NAME = 100
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_-]+)*")


class FactorError(ValueError):
    """Says in one line which factor cannot be part of a key."""


@dataclass(frozen=True)
class Difference:
    """Describes a factor with two different values. ``ABSENT``: the side does not have the factor."""

    name: str
    ours: Factor
    theirs: Factor

    def __str__(self) -> str:
        return f"{self.name} is {_shown(self.ours)} here and {_shown(self.theirs)} there"


def artifact_key(factors: Factors) -> str:
    """Returns the SHA-256, in hex, of the factors as canonical JSON. Raises FactorError if a name is not dotted
    lower case, or a value is not JSON (NaN and objects are not)."""
    return hashlib.sha256(canonical_json(check_factors(factors))).hexdigest()


def canonical_json(value: object) -> bytes:
    """Returns the canonical encoding of a JSON value: sorted keys, no spaces, UTF-8. Raises ValueError or TypeError
    if the value is not JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def check_factors(factors: Mapping[str, object]) -> dict[str, Factor]:
    """Checks names, types and number of factors, and returns them. Raises FactorError as ``artifact_key`` does."""
    if len(factors) > MAX_FACTORS:
        raise FactorError(f"there are {len(factors)} factors, more than {MAX_FACTORS}")
    return {_checked_name(name): _checked(name, value) for name, value in factors.items()}


def differing(ours: Factors, theirs: Factors) -> list[Difference]:
    """Returns the factors that differ, sorted by name. 1, 1.0 and true are three different values."""
    return [
        Difference(name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted({*ours, *theirs})
        if _spelled(ours, name) != _spelled(theirs, name)
    ]


def _spelled(factors: Factors, name: str) -> bytes | None:
    return canonical_json(factors[name]) if name in factors else None


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise FactorError(
            f"factor name {str(name)[:_MAX_NAME]!r}: write lower-case words joined by dots, such as model.dtype"
        )
    return name


def _checked(name: str, value: object, depth: int = 0) -> Factor:
    if isinstance(value, list):
        if depth == MAX_DEPTH:
            raise FactorError(f"factor {name} has over {MAX_DEPTH} lists in each other")
        return [_checked(name, item, depth + 1) for item in value]
    if isinstance(value, float) and value - value != 0:  # NaN and infinities are not JSON
        raise FactorError(f"factor {name} is {value}: only finite numbers can be part of a key")
    if isinstance(value, str) and not value.isprintable():  # also half a surrogate pair, which UTF-8 cannot say
        raise FactorError(f"factor {name} is {value[:80]!r}: only printable text can be part of a key")
    if value is None or isinstance(value, str | int | float):
        return value
    raise FactorError(f"factor {name} is a {type(value).__name__}: use text, numbers, booleans, null and lists")


def _shown(value: Factor) -> str:
    if value == ABSENT:
        return ABSENT
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def describe_model(factors: Factors) -> str:
    """Returns one line: ``blip: blip 384×384, 12 layers of 768 → blip, 12 layers of 768, 30524 tokens; float32``.

    A question mark stands for a factor that is missing, as in a manifest of another version."""

    def of(name: str) -> Any:
        return factors.get(f"model.{name}", "?")

    def layers(part: str) -> str:
        return f"{of(f'{part}.num_layers')} layers of {of(f'{part}.hidden_size')}"

    image = of("vision.image_size")
    size = "×".join(str(side) for side in image) if isinstance(image, list) else str(image)
    return (
        f"{of('family')}: {of('vision.family')} {size}, {layers('vision')} → "
        f"{of('decoder.family')}, {layers('decoder')}, {of('decoder.vocab_size')} tokens; {of('dtype')}"
    )


_LONG = r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
_SHORT = r"""["][^"\\\n]*(?:\\.[^"\\\n]*)*["]|['][^'\\\n]*(?:\\.[^'\\\n]*)*[']"""
# Strings are matched so that nothing in them is taken for a comment.
_TEXTS = re.compile(rf"#[^\n]*|{_LONG}|{_SHORT}", re.DOTALL)
_CLOSED = re.compile(r"\s*[)\]},]")


def code_of(source: str) -> str:
    """Returns Python source without comments, docstrings and blank lines."""
    code = _TEXTS.sub(_code, source)
    return "\n".join(line for line in map(str.rstrip, code.split("\n")) if line)


def _code(match: re.Match[str]) -> str:
    text = match[0]
    if text[0] == "#":
        return ""
    if text.startswith('"""'):
        source, start = match.string, match.start()
        before = source[source.rfind("\n", 0, start) + 1 : start]
        # A docstring begins its line, and no closing bracket follows it.
        if before.strip(" \trR") == "" and not _CLOSED.match(source, match.end()):
            return ""
    return text.replace("\n", "\\n") if "\n" in text else text


def source_digest(folder: Path, files: Iterable[Path]) -> str:
    """Returns the SHA-256, in hex, of the files below the folder, with their names. Line endings do not count, and
    of Python files only code does. Raises OSError if a file cannot be read, and UnicodeDecodeError if a file is not
    UTF-8."""
    digest = hashlib.sha256()
    for file in sorted(files):
        text = file.read_text("utf-8")  # with the line endings of Unix
        code = (code_of(text) if file.suffix == ".py" else text).encode()
        digest.update(b"%s %d\n%s" % (file.relative_to(folder).as_posix().encode(), len(code), code))
    return digest.hexdigest()


# Factors that change when the same machine is given other software.
_SOFTWARE = re.compile(r"(torch|triton|python|compiler|libc|source|format)(\..+)?")


def machine_factors(device: str) -> dict[str, Factor]:
    """Returns the versions of torch, triton and libc, and describes the CPU and the device of this machine.
    ``device``: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: cuda where torch and the driver have it, else cpu. Raises
    MachineError if torch is not installed, or the device is not there."""
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
        raise MachineError(f"device {device}: {error}; {NO_GPU}") from error
    return factors | {
        "device.type": "cuda",
        "device.name": found.name,
        "device.compute_capability": found.compute_capability,
        "device.multiprocessors": found.multiprocessors,
    }


def region_source_hash(device_type: object) -> str:
    """Returns the SHA-256, in hex, of the code that is compiled: layers, kernels and regions, and the dimensions
    that they are built from. Comments and docstrings do not count.

    Code that reads a configuration is left out, because its results reach a region as dimensions, which are
    factors. ``device_type``: ``cuda`` or ``cpu``; the kernels of a GPU do not count for a CPU."""
    models = package_folder("snapcap.models")
    rooms = ("layers", "regions") if device_type == "cpu" else ("layers", "kernels", "regions")
    files = (file for room in rooms for file in (models / room).rglob("*.py"))
    return source_digest(models, [models / "dimensions.py", *files])


def build_factors(
    machine: Mapping[str, Factor], kind: Kind, model: Mapping[str, Any], compilation: Mapping[str, Any]
) -> dict[str, Factor]:
    """Returns all factors of a key, flat: ``{"vision": {"hidden_size": 48}}`` of the model is
    ``model.vision.hidden_size``. Raises FactorError if a value is no JSON.

    Args:
        machine: the result of ``machine_factors``.
        model: dimensions, dtype, buckets and cache length; nested, as ``dataclasses.asdict`` gives it.
        compilation: modes, options and precision flags; nested or not.
    """
    factors: dict[str, Any] = {
        **machine,
        **_flat("model", model),
        **_flat("compile", compilation),
        "format": FORMAT,
        "kind": kind,
        "source.regions": region_source_hash(machine.get("device.type")),
    }
    if kind == "aot":
        factors["source.image_library"] = _cpp_digest("snapcap.models.processing")
        if factors.get("device.type") == "cpu":
            factors["source.cpu_library"] = _cpp_digest("snapcap.warmup.runtime.aoti")
    if kind == "jit":
        # jit artifacts are pickles of this Python, which torch looks up by compiler. Packages depend on neither.
        factors["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        factors["compiler"] = compiler_version()
    return check_factors(factors)


def _cpp_digest(package: str) -> str:
    """Returns the digest of a library's sources, which are in the folder `cpp` of a package."""
    sources = package_folder(package) / "cpp"
    return source_digest(sources, (file for file in sources.rglob("*") if file.suffix in (".cpp", ".h", ".txt")))


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
