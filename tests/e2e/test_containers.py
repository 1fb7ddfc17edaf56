"""Packages that the C interface refuses, each with its reason."""

import zipfile
import zlib
from pathlib import Path

import pytest

from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.runtime.aoti.packages import AotiError, Container

INSIDE = "package/data/aotinductor/model"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "holds 0 libraries"),
        (["a.wrapper.so", "b.wrapper.so"], "holds 2 libraries"),
        (["a.wrapper.so", "a.wrapper.json"], "calls operators of Python's dispatcher"),
        (["a.wrapper.so"], "file too short"),
    ],
)
def test_a_package_that_needs_more_is_refused(members: list[str], message: str, tmp_path: Path) -> None:
    package = tmp_path / "a.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        for name in members:
            archive.writestr(f"{INSIDE}/{name}", b"")
    with pytest.raises(AotiError, match=message):
        Container.open(VerifiedFile.of(package), "cpu")


def test_a_package_whose_library_does_not_unpack_is_refused(tmp_path: Path) -> None:
    package, content = tmp_path / "a.pt2", bytes(range(256)) * 64
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{INSIDE}/a.wrapper.so", content)
    packed = zlib.compress(content, wbits=-15)
    data = package.read_bytes()
    assert packed in data
    package.write_bytes(data.replace(packed, b"\xff" * len(packed)))
    with pytest.raises(AotiError, match="while decompressing data"):
        Container.open(VerifiedFile.of(package), "cpu")


def test_a_model_on_a_device_that_is_not_there_cannot_be_made(built_cache: Path) -> None:
    (folder,) = (built_cache / "store" / "builds").iterdir()
    with pytest.raises(AotiError, match="cannot be made on no-such-device"):
        Container.open(VerifiedFile.of(folder / "aot" / "decoder_before.b1.pt2"), "no-such-device")
