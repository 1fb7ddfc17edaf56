"""Where captions go, what is kept of earlier runs, and what is never left half."""

import csv
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from snapcap.models.text import Region
from snapcap.service.captioning.model_defaults import Answer
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.config.reader import SettingsError
from snapcap.service.offline.arguments import Job
from snapcap.service.offline.discovery import Failure, Found, OutputError
from snapcap.service.offline.outputs import TABLES, JsonLines, Outputs, Sidecars


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    return tmp_path


def write(
    outputs: Outputs,
    *images: str,
    broken: tuple[str, ...] = (),
    killed: bool = False,
    regions: list[Region] | None = None,
) -> None:
    """Writes what a run writes, in which the `broken` images fail, and which may be killed before it finishes.
    `regions`: of each caption."""
    with closing(outputs):
        outputs.begin()
        for image in images:
            outputs.write(image, Answer(f"caption of {image}", regions))
        for image in broken:
            outputs.fail(image, f"{image} is broken")
        if not killed:
            outputs.finish()


def outputs(*images: str, found: Found | None = None, **job: Any) -> Outputs:
    return Outputs(Job(images, CaptionOptions(), **job), found or Found(list(images)))


def lines(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def rows(path: str) -> list[tuple[str, str | None, str | None]]:
    """Reads a file as its users do."""
    if path.endswith(".parquet"):
        found = parquet.read_table(path).to_pylist()
    elif path.endswith(".csv"):
        with open(path, newline="", encoding="utf-8") as file:
            found = [{name: value or None for name, value in row.items()} for row in csv.DictReader(file)]
    else:
        found = lines(path)
    return [(row["file_name"], row["caption"], row.get("error")) for row in found]


def records(path: str) -> list[dict[str, Any]]:
    if path.endswith(".parquet"):
        return list(parquet.read_table(path).to_pylist())
    if path.endswith(".csv"):
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    return list(lines(path))


def columns(path: str) -> set[str]:
    return {name for record in records(path) for name in record}


def regions_of(path: str) -> dict[str, Any]:
    """The regions of each image, which are JSON text in a table."""
    given = {record["file_name"]: record.get("regions") for record in records(path)}
    return {
        name: json.loads(regions or "null") if isinstance(regions, str) else regions
        for name, regions in given.items()
    }


def refuse(*_: object) -> Iterator[Any]:
    raise PermissionError(errno.EACCES, "Permission denied")


def captioned(*images: str) -> list[tuple[str, str, None]]:
    return [(image, f"caption of {image}", None) for image in images]


def failed(*images: str) -> list[tuple[str, None, str]]:
    return [(image, None, f"{image} is broken") for image in images]


@pytest.mark.parametrize("path", ["c.jsonl", "c.csv", "c.parquet"])
class TestEveryFormat:
    def test_each_image_has_a_row_and_a_failed_one_its_error(self, here: Path, path: str) -> None:
        found = Found(["a.png", "b.png", "x.png"], [Failure("gone.png", "gone"), Failure("*.gif", "", False)])
        write(outputs(output=path, found=found), "a.png", "b.png", broken=("x.png",))
        assert rows(path) == [("gone.png", None, "gone"), *captioned("a.png", "b.png"), *failed("x.png")]
        assert {each.name for each in here.iterdir()} == {path, "photos"}

    def test_resume_captions_what_failed_again_and_replaces_its_row(self, here: Path, path: str) -> None:
        write(outputs("a.png", "x.png", "y.png", output=path), "a.png", broken=("x.png", "y.png"))
        later = outputs("a.png", "x.png", "b.png", output=path, resume=True)
        assert (later.todo, later.held) == (["x.png", "b.png"], 1)
        write(later, "x.png", "b.png")
        assert sorted(rows(path)) == sorted([*captioned("a.png", "b.png", "x.png"), *failed("y.png")])
        assert {each.name for each in here.iterdir()} == {path, "photos"}

    def test_regions_have_a_column_as_soon_as_a_caption_names_some(self, path: str) -> None:
        regions = [Region("ein „Hut“", (1, 2, 3, 4)), Region("", (0, 0, 5, 6), ((0, 0, 5, 0, 5, 6),))]
        write(outputs("a.png", output=path), "a.png")
        assert columns(path) <= {"file_name", "caption", "error"}
        later = outputs("a.png", "b.png", "x.png", output=path, resume=True)
        write(later, "b.png", broken=("x.png",), regions=regions)
        last = outputs("a.png", "b.png", "c.png", "x.png", output=path, resume=True)
        assert last.todo == ["c.png", "x.png"]
        write(last, "c.png", "x.png", regions=[])
        assert sorted(rows(path)) == sorted(captioned("a.png", "b.png", "c.png", "x.png"))
        boxes = [{"label": "ein „Hut“", "box": [1, 2, 3, 4]}]
        boxes.append({"label": "", "box": [0, 0, 5, 6], "polygons": [[0, 0, 5, 0, 5, 6]]})
        assert regions_of(path) == {"a.png": None, "b.png": boxes, "c.png": [], "x.png": []}

    def test_a_killed_run_loses_nothing(self, here: Path, path: str) -> None:
        write(outputs("a.png", "b.png", output=path), "a.png")
        for image in ("b.png", "c.png"):
            write(outputs("a.png", image, output=path, resume=True), image, broken=("x.png",), killed=True)
        with pytest.raises(SettingsError, match="has captions: --resume keeps them"):
            outputs("d.png", output=path)
        last = outputs("a.png", "b.png", "c.png", output=path, resume=True)
        assert last.todo == []
        last.begin()
        last.finish()
        last.close()
        assert sorted(set(rows(path))) == sorted([*captioned("a.png", "b.png", "c.png"), *failed("x.png")])
        assert {each.name for each in here.iterdir()} == {path, "photos"}

    def test_a_run_that_captions_nothing_leaves_the_file(self, path: str) -> None:
        write(outputs("a.png", output=path), "a.png")
        for job in ({"overwrite": True}, {"resume": True}):
            not_begun = outputs("b.png", output=path, **job)
            not_begun.finish()  # the model cannot be started
            not_begun.close()
        write(outputs(output=path, overwrite=True, found=Found(failures=[Failure("fotos", "gone")])))
        assert rows(path) == captioned("a.png")

    def test_overwrite_keeps_nothing(self, path: str) -> None:
        write(outputs("a.png", output=path), "a.png")
        write(outputs("b.png", "c.png", output=path, overwrite=True), "b.png", killed=True)
        write(outputs("b.png", "c.png", output=path, resume=True), "c.png")
        assert rows(path) == captioned("b.png", "c.png")

    def test_names_and_captions_of_every_kind(self, path: str) -> None:
        images = [os.fsdecode(b"\xff.png"), "ü 名.png", 'a,"b".png', "line\nbreak.png", "return\r.png", "=1+1.png"]
        write(outputs(*images, output=path), *images[1:], broken=(images[0],))
        assert rows(path)[:-1] == captioned(*images[1:])
        later = outputs(*images, output=path, resume=True)
        assert later.todo == images[:1]
        write(later, *images[:1])
        assert outputs(*images, output=path, resume=True).todo == []

    def test_a_link_stays_a_link(self, path: str) -> None:
        Path(path).symlink_to(f"photos/{path}")
        write(outputs("a.png", output=path), broken=("a.png",))
        write(outputs("a.png", output=path, resume=True), "a.png")
        assert Path(path).is_symlink()
        assert rows(f"photos/{path}") == captioned("a.png")

    def test_a_second_run_is_refused_while_the_first_writes(self, path: str) -> None:
        first = outputs("a.png", output=path)
        with pytest.raises(SettingsError, match="another process writes"):
            outputs("a.png", output=path)
        first.close()

    def test_a_folder_of_this_name_is_refused(self, path: str) -> None:
        Path(path).mkdir()
        with pytest.raises(SettingsError, match="cannot be written: Is a directory"):
            outputs("a.png", output=path, overwrite=True)


@pytest.mark.parametrize("path", ["c.csv", "c.parquet"])
class TestTables:
    @pytest.mark.parametrize("data", [b"anything\n", b"file_name,caption,error\nonly two,columns\n", b"\xff\xfe\n"])
    def test_another_file_is_not_touched(self, path: str, data: bytes) -> None:
        Path(path).write_bytes(data)
        with pytest.raises(SettingsError, match=f"{path} is not a table of the columns file_name, caption, error"):
            outputs("a.png", output=path, resume=True)
        assert Path(path).read_bytes() == data
        assert not Path(f"{path}.jsonl").exists()

    def test_a_table_that_may_not_be_read_is_named(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        write(outputs("a.png", output=path), "a.png")
        monkeypatch.setitem(TABLES, Path(path).suffix, TABLES[Path(path).suffix]._replace(read=refuse))
        with pytest.raises(SettingsError, match=f"--output {path} cannot be read: Permission denied"):
            outputs("a.png", output=path, resume=True)

    def test_a_full_disk_leaves_the_file_before_and_the_journal(
        self, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(outputs("a.png", output=path), "a.png")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(OutputError, match=r"No space left on device; .*\.jsonl has the captions"):
                write(outputs("b.png", output=path, resume=True), "b.png")
        assert rows(path) == captioned("a.png")
        write(outputs("c.png", output=path, resume=True), "c.png")
        assert rows(path) == captioned("a.png", "b.png", "c.png")


def test_a_line_that_others_have_written_stays_as_it_is() -> None:
    Path("c.jsonl").write_text('{"file_name": "a.png", "text": "mine"}\n{"file_name": "x.png", "error": "x"}\n')
    later = outputs("a.png", "x.png", output="c.jsonl", resume=True)
    assert later.todo == ["x.png"]
    write(later, "x.png")
    assert lines("c.jsonl") == [
        {"file_name": "a.png", "text": "mine"},
        {"file_name": "x.png", "caption": "caption of x.png"},
    ]


class TestJsonLines:
    def test_names_are_relative_to_the_file_or_absolute(self, here: Path) -> None:
        write(outputs("photos/a.png", "b.png", output="photos/captions.jsonl"), "photos/a.png", "b.png")
        assert lines("photos/captions.jsonl") == [
            {"file_name": "a.png", "caption": "caption of photos/a.png"},
            {"file_name": str(here / "b.png"), "caption": "caption of b.png"},
        ]

    def test_a_later_run_goes_on_from_wherever_it_is_started(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(outputs("photos/a.png", "b.png", output="photos/c.jsonl"), "photos/a.png", "b.png")
        monkeypatch.chdir(here / "photos")
        later = outputs("a.png", "../b.png", "new.png", output="c.jsonl", resume=True)
        assert (later.todo, later.held) == (["new.png"], 2)
        write(later, "new.png")
        assert [line["file_name"] for line in lines("c.jsonl")] == ["a.png", str(here / "b.png"), "new.png"]

    def test_a_half_line_is_cut_off(self) -> None:
        Path("c.jsonl").write_text('{"file_name": "a.png", "caption": "x"}\n{"file_name": "b.p')
        later = outputs("a.png", "b.png", output="c.jsonl", resume=True)
        assert later.todo == ["b.png"]
        write(later, "b.png")
        assert [line["file_name"] for line in lines("c.jsonl")] == ["a.png", "b.png"]

    def test_a_last_line_without_a_line_break_stays(self) -> None:
        mine = '{"file_name": "a.png", "caption": "x"}\n{"file_name": "b.png", "caption": "by hand"}'
        Path("c.jsonl").write_text(mine)
        later = outputs("a.png", "b.png", "c.png", output="c.jsonl", resume=True)
        assert Path("c.jsonl").read_text() == mine  # the start may fail yet
        assert later.todo == ["c.png"]
        write(later, "c.png")
        assert Path("c.jsonl").read_text().startswith(f"{mine}\n")
        assert [line["caption"] for line in lines("c.jsonl")] == ["x", "by hand", "caption of c.png"]

    def test_an_error_without_a_line_break_is_tried_again(self) -> None:
        Path("c.jsonl").write_text('{"file_name": "a.png", "caption": null, "error": "x"}')
        write(outputs("a.png", output="c.jsonl", resume=True), "a.png")
        assert lines("c.jsonl") == [{"file_name": "a.png", "caption": "caption of a.png"}]

    @pytest.mark.parametrize("end", ["\n", ""])
    @pytest.mark.parametrize("line", ["not json", '{"caption": "x"}', "[]", '{"file_name": 3}', "\n", "a note"])
    def test_what_is_not_a_file_of_captions_is_not_touched(self, line: str, end: str) -> None:
        text = f"{line}{end}"
        Path("c.jsonl").write_text(text)
        with pytest.raises(SettingsError, match=r"c\.jsonl line 1 is not a caption"):
            outputs("a.png", output="c.jsonl", resume=True)
        with pytest.raises(
            SettingsError, match="--resume keeps them and adds the others, --overwrite replaces them"
        ):
            outputs("a.png", output="c.jsonl")
        assert Path("c.jsonl").read_text() == text

    def test_overwrite_begins_anew_with_the_first_caption(self) -> None:
        write(outputs("a.png", output="c.jsonl"), "a.png")
        anew = outputs("b.png", output="c.jsonl", overwrite=True)
        assert [line["file_name"] for line in lines("c.jsonl")] == ["a.png"]  # the start may fail yet
        write(anew, "b.png")
        assert [line["file_name"] for line in lines("c.jsonl")] == ["b.png"]

    def test_a_name_that_is_not_text_is_found_again(self) -> None:
        image = os.fsdecode(b"\xff.png")
        write(outputs(image, output="c.jsonl"), image)
        assert outputs(image, output="c.jsonl", resume=True).todo == []

    def test_text_stays_legible(self) -> None:
        write(outputs("ü 名.png", output="c.jsonl"), "ü 名.png")
        assert "ü 名.png" in Path("c.jsonl").read_text(encoding="utf-8")

    def test_a_full_disk_leaves_whole_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        file = JsonLines("c.jsonl", resume=False, overwrite=False)
        file.begin([])
        file.write("a.png", Answer("x"))
        real = os.write

        def half(descriptor: int, data: bytes) -> int:
            if len(data) < 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data[:-5])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OutputError, match="No space left on device"):
            file.write("b.png", Answer("y"))
        file.close()
        assert [line["file_name"] for line in lines("c.jsonl")] == ["a.png"]

    def test_a_folder_that_is_not_there(self) -> None:
        with pytest.raises(SettingsError, match=r"--output gone/c\.jsonl cannot be written: No such file"):
            outputs("a.png", output="gone/c.jsonl")

    def test_a_device_takes_captions(self) -> None:
        write(outputs("a.png", output=os.devnull), "a.png")

    @pytest.mark.timeout(60)  # against for ever
    def test_a_pipe_has_no_reader_but_its_own(self, here: Path) -> None:
        """A run that reads the pipe itself waits for ever for room in it, or ends with rows that nobody got."""
        os.mkfifo(here / "pipe")
        reader = os.open(here / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        with closing(outputs("a.png", output="pipe")) as later:
            later.begin()
            later.write("a.png", Answer("x"))
            assert json.loads(os.read(reader, 1 << 16))["file_name"] == "a.png"
            os.close(reader)
            with pytest.raises(OutputError, match="--output pipe cannot be written: Broken pipe"):
                later.write("b.png", Answer("y"))


class TestSidecars:
    def test_beside_each_image(self) -> None:
        write(outputs("photos/a.b.png", sidecar=True), "photos/a.b.png")
        assert Path("photos/a.b.txt").read_text() == "caption of photos/a.b.png\n"
        assert [path.name for path in Path("photos").iterdir()] == ["a.b.txt"]

    @pytest.mark.parametrize("stem", ["x" * 251, "写" * 83, "x" * 245], ids=["ascii", "three bytes", "just fits"])
    def test_beside_an_image_with_the_longest_name(self, here: Path, stem: str) -> None:
        Path("photos", f"{stem}.jpg").touch()
        for _ in range(2):
            write(outputs(f"photos/{stem}.jpg", sidecar=True, overwrite=True), f"photos/{stem}.jpg")
            assert Path("photos", f"{stem}.txt").read_text() == f"caption of photos/{stem}.jpg\n"
            assert len(list((here / "photos").iterdir())) == 2

    def test_resume_keeps_and_overwrite_replaces(self) -> None:
        Path("a.txt").write_text("by hand")
        Path("b.txt").touch()  # what a crash of the machine may leave
        with pytest.raises(SettingsError, match=r"1 sidecar exists \(a\.txt\)"):
            outputs("a.png", "b.png", sidecar=True)
        later = outputs("a.png", "b.png", sidecar=True, resume=True)
        assert (later.todo, later.held) == (["b.png"], 1)
        assert outputs("a.png", "b.png", sidecar=True, overwrite=True).todo == ["a.png", "b.png"]

    @pytest.mark.timeout(60)  # against for ever
    @pytest.mark.parametrize("kind", ["left", "link", "fifo"])
    def test_what_lies_where_a_part_is_written_is_neither_written_through_nor_waited_for(
        self, here: Path, kind: str
    ) -> None:
        mine, part = here / "thesis", here / "photos" / ".a.txt.part"
        mine.write_text("three years of work")
        if kind == "left":
            part.write_text("of a run that was killed")
        elif kind == "link":
            part.symlink_to(mine)
        else:
            os.mkfifo(part)
        write(outputs("photos/a.png", sidecar=True), "photos/a.png")
        assert (here / "photos" / "a.txt").read_text() == "caption of photos/a.png\n"
        assert mine.read_text() == "three years of work"
        assert not part.exists()

    def test_two_images_with_one_sidecar(self) -> None:
        found = Found(["a.jpg", "a.png", "odd.txt"])
        both = outputs(found=found, sidecar=True)
        assert both.todo == ["a.jpg"]
        assert [(each.path, each.reason) for each in found.failures] == [
            ("a.png", "the sidecar a.txt belongs to a.jpg; rename one of the two images"),
            ("odd.txt", "the image has the name of its own sidecar; rename the image"),
        ]

    def test_what_cannot_be_replaced_stays_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("a.txt").write_text("before")

        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(PermissionError):
            Sidecars(resume=False).write("a.png", Answer("x"))
        assert {path.name for path in Path().iterdir()} == {"a.txt", "photos"}
        assert Path("a.txt").read_text() == "before"

    def test_a_full_disk_ends_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OutputError, match="No space left on device"):
            Sidecars(resume=False).write("a.png", Answer("x"))


def test_printed_lines_lose_nothing_in_the_encoding_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a name that are not text, and letters that the encoding lacks."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))
    image = os.fsdecode(b"\xff \xc3\xa9 \xe6\x97\xa5.png")
    write(outputs(image), image)
    assert printed.getvalue().startswith(b"\xff \xe9 \\u65e5.png\tcaption of ")


def test_with_both_an_image_is_done_when_both_have_it() -> None:
    write(outputs("a.png", output="c.jsonl"), "a.png")
    Path("b.txt").write_text("by hand")
    later = outputs("a.png", "b.png", output="c.jsonl", sidecar=True, resume=True)
    assert later.todo == ["a.png", "b.png"]
    write(later, "a.png", "b.png")
    assert [line["file_name"] for line in lines("c.jsonl")] == ["a.png", "b.png"]  # a.png not twice
    assert Path("b.txt").read_text() == "by hand"
    assert outputs("a.png", "b.png", output="c.jsonl", sidecar=True, resume=True).todo == []
