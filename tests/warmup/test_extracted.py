"""Folders that AOTInductor's loader leaves behind."""

import sys
import zipfile
from pathlib import Path

import pytest
import torch

from warmup.backends.aot import PackageError, open_package
from warmup.extracted import discard_folders, discard_mapped

INSIDE = Path("package") / "data" / "aotinductor" / "model"


def extracted(temporary: Path, name: str) -> Path:
    library = temporary / name / INSIDE / "a.wrapper.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    return library


def test_only_the_loaders_folders_are_removed_whole(tmp_path: Path) -> None:
    temporary = tmp_path / "with spaces"
    ours = extracted(temporary, "aotinductor_aB3dE6")
    second = extracted(temporary, "aotinductor_000000")
    other = extracted(temporary, "of-somebody-else")
    discard_folders(
        [
            f"7f3d82467000-7f3d8247e000 r--p 00000000 fe:00 2236802                    {ours}",
            f"Error in dlopen: {second}: failed to map segment from shared object",
            f"7f3d82467000-7f3d8247e000 r--p 00000000 fe:00 2236803                    {other}",
            "nothing",
        ]
    )
    assert list(temporary.iterdir()) == [temporary / "of-somebody-else"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's maps")
def test_what_is_mapped_is_found_and_stays_usable(tmp_path: Path) -> None:
    import mmap

    library = extracted(tmp_path, "aotinductor_mapped")
    library.write_bytes(b"x" * mmap.PAGESIZE)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        discard_mapped()
        assert list(tmp_path.iterdir()) == []
        discard_mapped()
        assert mapped[:1] == b"x"


def test_a_package_that_cannot_be_opened_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    package = tmp_path / "broken.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(str(INSIDE / "a.wrapper.so"), b"not a library")
        archive.writestr(str(INSIDE / "a.wrapper.cpp"), b"")
        archive.writestr(str(INSIDE / "a.wrapper_metadata.json"), b'{"AOTI_DEVICE_KEY": "cpu"}')
    with pytest.raises(PackageError, match=r"broken\.pt2 cannot be opened: .*aotinductor_"):
        open_package(package, torch.device("cpu"))
    assert list((tmp_path / "temporary").iterdir()) == []
