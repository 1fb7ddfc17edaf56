"""Names the packages of an aot artifact set, one a region and bucket, and checks what each expects as inputs."""

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapcap.warmup.plan.buckets import Bucket

if TYPE_CHECKING:
    from snapcap.models.regions.table import Region, Regions

MODEL_NAME = "model"  # the one model inside each package

_ENTRY = re.compile(r"aot/(?P<region>\w+)\.b(?P<size>\d+)\.pt2")

# Per input: [dtype, shape, strides]. Manifests and the records of builds have it under "signature".
InputSpecs = list[list[Any]]


class PackageError(RuntimeError):
    """A package that cannot be opened; one line that names it."""


class InputSpecError(RuntimeError):
    """A package that was built for other inputs; running it would read past them or give wrong numbers."""


def entry_name(region: str, size: int) -> str:
    """``aot/encoder_block.b4.pt2``"""
    return f"aot/{region}.b{size}.pt2"


def region_of(entry: str) -> tuple[str, int]:
    """Returns the region and bucket size that ``entry_name`` made a name of.

    Raises:
        ValueError: it is no name of a package.
    """
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry} is no name of a package")
    return match["region"], int(match["size"])


def entry_names(regions: "Regions", sizes: Sequence[int]) -> list[tuple["Region", Bucket, str]]:
    """Every package of a set, smallest buckets first: what a lone request needs is ready first, and last what only
    some requests need."""
    return [
        (region, Bucket(size), entry_name(region.name, size))
        for on_demand in (False, True)
        for size in sorted(sizes)
        for region in regions
        if region.on_demand is on_demand
    ]


def check_inputs(entry: str, expected: object, actual: InputSpecs) -> None:
    """Compare what a package was built for with what it is going to be given; a package checks nothing itself.

    Raises:
        InputSpecError: they differ; names the first input that does.
    """
    if not isinstance(expected, list) or len(expected) != len(actual):
        count = len(expected) if isinstance(expected, list) else 0
        raise InputSpecError(f"{entry} was built for {count} inputs, the region has {len(actual)}")
    for position, (built, given) in enumerate(zip(expected, actual, strict=True)):
        if built != given:
            raise InputSpecError(f"{entry}: input {position} was built as {built}, but is {given}")


def is_whole(package: Path) -> bool:
    """Returns whether every file of a package has content."""
    with zipfile.ZipFile(package) as members:
        return all(member.file_size for member in members.infolist() if not member.is_dir())


def slim(package: Path) -> None:
    """Empty the generated sources of a package and compress it: about a tenth to store and to download.

    The loader reads the shared library and its metadata only, but torch 2.11 finds the metadata by the name of the
    source, so that has to stay. Members keep their order and get a fixed date: equal contents give equal bytes.
    """
    slimmed = package.with_suffix(".slim")
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(slimmed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            info = zipfile.ZipInfo(member.filename, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = member.external_attr
            info.compress_type = zipfile.ZIP_DEFLATED
            generated = member.filename.endswith((".cpp", ".h"))
            target.writestr(info, b"" if generated else source.read(member))
    slimmed.replace(package)
