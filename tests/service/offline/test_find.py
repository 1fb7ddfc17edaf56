"""Which files the operands of `snapcap caption` mean."""

import os
from pathlib import Path

import pytest

from snapcap.service.offline.discovery import Found, find_images


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "b.JPG",
        "a b.png",
        "ü.webp",
        "notes.txt",
        "._b.JPG",
        "sub/c.jpeg",
        "sub/deep/d.png",
        ".git/e.png",
    ):
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


def find(*operands: str, recursive: bool = False, lines: tuple[bytes, ...] = ()) -> Found:
    return find_images(operands, recursive, lines)


TOP = ["photos/a b.png", "photos/b.JPG", "photos/ü.webp"]


@pytest.mark.usefixtures("folder")
class TestFinds:
    def test_a_folder_by_extension_and_without_hidden_files(self) -> None:
        assert find("photos") == Found(TOP)

    def test_folders_of_folders(self) -> None:
        assert find("photos", recursive=True) == Found([*TOP, "photos/sub/c.jpeg", "photos/sub/deep/d.png"])

    def test_a_file_whatever_its_name_is(self) -> None:
        assert find("photos/notes.txt") == Found(["photos/notes.txt"])

    def test_a_pattern_that_the_shell_has_left_alone(self) -> None:
        assert find("photos/*") == Found(["photos/a b.png", "photos/b.JPG", "photos/sub/c.jpeg", "photos/ü.webp"])
        assert find("photos/**/*.png") == Found(["photos/a b.png", "photos/sub/deep/d.png"])

    def test_a_file_whose_name_looks_like_a_pattern(self) -> None:
        Path("photos/x[1].png").touch()
        assert find("photos/x[1].png") == Found(["photos/x[1].png"])

    def test_each_image_once_where_it_came_first(self, folder: Path) -> None:
        found = find("photos/b.JPG", "photos", "photos/*.png", "./photos/b.JPG", str(folder / "photos"))
        assert found == Found(["photos/b.JPG", "photos/a b.png", "photos/ü.webp"])

    def test_a_list_of_names_of_files_and_folders(self) -> None:
        found = find("-", lines=(b"photos/b.JPG\n", b"\n", b"photos/sub\r\n", b"photos/a b.png"))
        assert found == Found(["photos/b.JPG", "photos/sub/c.jpeg", "photos/a b.png"])

    def test_a_name_that_is_not_text(self, folder: Path) -> None:
        (Path(os.fsdecode(os.fsencode(folder) + b"/photos/\xff.png"))).touch()
        found = find("-", lines=(b"photos/\xff.png\n",))
        assert [os.fsencode(image) for image in found.images] == [b"photos/\xff.png"]

    def test_links_to_files_but_not_to_folders(self, folder: Path) -> None:
        (folder / "photos/link.png").symlink_to("b.JPG")
        (folder / "photos/loop").symlink_to(folder / "photos", target_is_directory=True)
        found = find("photos/sub", "photos", recursive=True)
        assert "photos/link.png" in found.images
        assert not [image for image in found.images if "loop" in image]

    def test_what_is_missing_is_named(self) -> None:
        Path("empty/inside").mkdir(parents=True)
        found = find("photos/b.JPG", "gone.png", "empty", "*.png", "-", lines=(b"lost.jpg\n",))
        assert found.images == ["photos/b.JPG"]
        assert [(each.path, each.reason.partition(";")[0]) for each in found.failures] == [
            ("gone.png", "No such file or directory"),
            ("empty", "no JPEG, PNG or WEBP file in this folder"),
            ("*.png", "no JPEG, PNG or WEBP file matches"),
            ("lost.jpg", "No such file or directory"),
        ]

    def test_images_of_other_formats_are_named_once(self) -> None:
        Path("photos/z.HEIC").touch()
        found = find("photos", "photos/*")
        assert [each.path for each in found.failures] == ["photos/z.HEIC"]
        assert found.failures[0].reason.startswith("HEIC images are not read")

    def test_folder_that_may_not_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scandir = os.scandir

        def refuse(path: str) -> object:
            if path == os.path.join("photos", "sub"):
                raise PermissionError(13, "Permission denied", path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refuse)
        found = find("photos", recursive=True)
        assert found.images == TOP
        assert [(each.path, each.reason) for each in found.failures] == [("photos/sub", "Permission denied")]
