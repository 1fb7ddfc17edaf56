"""Which files the operands of `snapcap caption` mean."""

import errno
import glob
import os
from pathlib import Path
from typing import Any

import pytest
from support.parity.pictures import encoded, scene

from snapcap.models.processing.image_formats import readable
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
    def test_a_folder_without_hidden_files(self) -> None:
        assert find("photos") == Found(TOP, [], ["photos/notes.txt"])

    def test_folders_of_folders(self) -> None:
        found = find("photos", recursive=True)
        assert found.images == [*TOP, "photos/sub/c.jpeg", "photos/sub/deep/d.png"]

    def test_a_file_whatever_its_name_is(self) -> None:
        assert find("photos/notes.txt") == Found(["photos/notes.txt"])

    def test_a_pattern_that_the_shell_has_left_alone(self) -> None:
        assert find("photos/*").images == ["photos/a b.png", "photos/b.JPG", "photos/sub/c.jpeg", "photos/ü.webp"]
        assert find("photos/**/*.png") == Found(["photos/a b.png", "photos/sub/deep/d.png"])

    @pytest.mark.timeout(60)  # against for ever
    def test_a_pattern_ends_where_a_link_leads_back(self, folder: Path) -> None:
        (folder / "far/away").mkdir(parents=True)
        (folder / "far/away/f.png").touch()
        for name, target in (("one", "."), ("two", "../photos"), ("away", "../far/away")):
            (folder / "photos" / name).symlink_to(target, target_is_directory=True)
        assert find("photos/**/*.png").images == ["photos/a b.png", "photos/away/f.png", "photos/sub/deep/d.png"]

    @pytest.mark.parametrize(
        "pattern", ["**/*.png", "photos/**", "*/**/deep/**/*", "photos/**/sub/*.jpeg", "photos/.git/**/*", "**"]
    )
    def test_a_pattern_of_folders_means_what_it_means_elsewhere(self, pattern: str) -> None:
        files = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        found = find(pattern)
        assert {*files} == {*found.images, *found.others}

    def test_a_file_whose_name_looks_like_a_pattern(self) -> None:
        Path("photos/x[1].png").touch()
        assert find("photos/x[1].png") == Found(["photos/x[1].png"])

    def test_each_image_once_where_it_came_first(self, folder: Path) -> None:
        found = find("photos/b.JPG", "photos", "photos/*.png", "./photos/b.JPG", str(folder / "photos"))
        assert found.images == ["photos/b.JPG", "photos/a b.png", "photos/ü.webp"]

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

    def test_a_link_that_leads_nowhere_is_named_and_loses_no_other_picture(self, folder: Path) -> None:
        (folder / "photos/a.png").symlink_to("a.png")
        (folder / "photos/b.png").symlink_to("gone.png")
        found = find("photos")
        assert found.images == TOP
        assert [(each.path, each.reason) for each in found.failures] == [
            ("photos/a.png", os.strerror(errno.ELOOP)),
            ("photos/b.png", os.strerror(errno.ENOENT)),
        ]

    def test_what_is_missing_is_named(self) -> None:
        Path("empty/inside").mkdir(parents=True)
        Path("loop").symlink_to("loop")
        lines = (b"lost.jpg\n", b"loop\n", b"a.png\0b.png\n", b"lost.jpg\n", b"x" * 300)
        found = find("photos/b.JPG", "gone.png", "empty", "*.png", "-", lines=lines)
        assert found.images == ["photos/b.JPG"]
        assert [(each.path, each.reason.partition(";")[0]) for each in found.failures] == [
            ("gone.png", "No such file or directory"),
            ("empty", "no picture in this folder"),
            ("*.png", "no picture matches"),
            ("lost.jpg", "No such file or directory"),
            ("loop", "Too many levels of symbolic links"),
            ("a.png\0b.png", "embedded null byte"),
            ("x" * 300, "File name too long"),
        ]

    def test_pictures_are_known_by_their_first_bytes(self) -> None:
        small = scene(20, 10)
        kinds = {"a.MPO": "JPEG", "b.apng": "PNG", "c.jpe": "JPEG", "d.pjpeg": "JPEG", "e": "WEBP", "f.dat": "GIF"}
        kinds |= {"g.txt": "BMP", "h.TIF": "TIFF", "i.avif": "AVIF"}
        for name, kind in kinds.items():
            Path("photos/sub", name).write_bytes(encoded(small, kind))
        names = sorted([*kinds, "c.jpeg"])
        assert find("photos/sub") == Found([f"photos/sub/{name}" for name in names])

    def test_pictures_of_other_formats_are_named_once(self) -> None:
        files = {
            "a.psd": b"8BPS\0\1",
            "b.jpg": b"\xff\x0a",
            "c.svg": b"<?xml version='1.0'?><svg/>",
            "d.pnm": b"P6 9 9 255 ",
        }
        files["e.tga"] = encoded(scene(80, 80), "TGA")
        for name, data in files.items():
            Path("photos/sub", name).write_bytes(data)
        found = find("photos/sub", "photos/sub/*.*")
        assert [(each.path, each.reason.partition(" images")[0]) for each in found.failures] == [
            ("photos/sub/a.psd", "Photoshop (PSD)"),
            ("photos/sub/b.jpg", "JPEG XL"),
            ("photos/sub/c.svg", "SVG"),
            ("photos/sub/d.pnm", "PPM"),
            ("photos/sub/e.tga", "TGA"),
        ]
        assert all(each.reason.endswith(f"are not read; convert it to {readable()}") for each in found.failures)
        assert found.images == ["photos/sub/c.jpeg"]

    def test_what_is_no_picture_is_left_out_and_counted(self) -> None:
        Path("photos/page.html").write_text("<html></html>")
        Path("photos/film.mp4").write_bytes(b"\0\0\0\x18ftypisom\0\0\2\0")
        Path("photos/lost.jpg").write_text("<html>404</html>")  # captioning it fails, and says why
        found = find("photos", "photos/?[aio]*")
        assert found.others == ["photos/film.mp4", "photos/notes.txt", "photos/page.html"]
        assert "photos/lost.jpg" in found.images
        assert not found.failures

    def test_a_file_that_may_not_be_read_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = os.open

        def refuse(path: str, *others: Any, **named: Any) -> int:
            if path == os.path.join("photos", "b.JPG"):
                raise PermissionError(13, "Permission denied", path)
            return opened(path, *others, **named)

        monkeypatch.setattr(os, "open", refuse)
        found = find("photos")
        assert found.images == [TOP[0], TOP[2]]
        assert [(each.path, each.reason) for each in found.failures] == [("photos/b.JPG", "Permission denied")]

    def test_a_pipe_keeps_nobody_waiting(self) -> None:
        os.mkfifo("photos/pipe.png")
        assert find("photos").images == TOP
        assert [each.path for each in find("photos/*.png").failures] == ["photos/pipe.png"]

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
