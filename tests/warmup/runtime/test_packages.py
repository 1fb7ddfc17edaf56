"""Package files by name, and whether they are whole."""

import zipfile
from pathlib import Path

import pytest

from snapcap.warmup.runtime.aoti.packages import entry_name, is_whole, region_of


@pytest.mark.parametrize(("region", "size"), [("encoder_block", 1), ("decoder_beams", 64)])
def test_a_name_gives_back_what_it_was_made_of(region: str, size: int) -> None:
    assert region_of(entry_name(region, size)) == (region, size)


@pytest.mark.parametrize("entry", ["encoder_block.b4.pt2", "aot/encoder_block.pt2", "aot/block.b4.json", ""])
def test_other_names_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="no name of a package"):
        region_of(entry)


def test_a_package_with_an_empty_file_is_not_whole(tmp_path: Path) -> None:
    package = tmp_path / "a.pt2"
    with zipfile.ZipFile(package, "w") as members:
        members.mkdir("model")
        members.writestr("model/a.wrapper.so", b"library")
    assert is_whole(package)
    with zipfile.ZipFile(package, "a") as members:
        members.writestr("model/a.kernel_metadata.json", b"")
    assert not is_whole(package)
