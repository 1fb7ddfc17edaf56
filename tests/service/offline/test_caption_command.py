"""`snapcap caption` in a process of its own, over real folders."""

import csv
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import parquet
from support.servers.server_process import clean_environment, python, snapcap

from snapcap.models.processing.image_formats import readable
from snapcap.service.cli import main as cli

EAGER = ("--backend", "eager", "--buckets", "1,4")


@pytest.fixture
def photos(tmp_path: Path, samples: dict[Path, str]) -> tuple[Path, dict[str, str]]:
    """A folder as people have them, and the captions of the images in it by their names under it."""
    folder = tmp_path / "my photos"
    (folder / "sub" / "deep").mkdir(parents=True)
    names = {"pair-1.png": "sub/ünï cödé.PNG", "one-1.png": "sub/deep/one[1].jpeg"}
    expected = {}
    for sample, caption in samples.items():
        name = names.get(sample.name, sample.name)
        shutil.copy(sample, folder / name)
        expected[name] = caption
    (folder / "broken.png").write_bytes(next(iter(samples)).read_bytes()[:300])
    (folder / "text.jpg").write_text("no image at all")
    (folder / "notes.md").write_text("passed over")
    (folder / "drawing.dat").write_text("<?xml version='1.0'?><svg/>")
    (folder / "._one-2.png").write_text("of macOS")
    return folder, expected


@pytest.fixture
def many(tmp_path: Path, samples: dict[Path, str]) -> tuple[Path, dict[str, str]]:
    """A folder that takes seconds, so that it can be interrupted."""
    folder = tmp_path / "many"
    folder.mkdir()
    expected = {}
    for index in range(15):
        for sample, caption in samples.items():
            name = f"{sample.stem}-{index}.png"
            shutil.copy(sample, folder / name)
            expected[name] = caption
    return folder, expected


def read(path: Path) -> dict[str, str]:
    """Returns the captions, or errors, of a file. Fails on a half line, and on an image that is there twice."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return outcomes([json.loads(line) for line in data.splitlines()])


def outcomes(rows: list[dict[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in rows:
        assert row["file_name"] not in found
        found[row["file_name"]] = row["caption"] or f"error: {row['error']}"
    return found


def test_a_folder_to_json_lines_and_again(
    photos: tuple[Path, dict[str, str]], compiled_options: tuple[str, ...]
) -> None:
    folder, expected = photos
    output = folder / "captions.jsonl"
    operands = (str(folder), str(folder / "*.png"), str(folder / "gone.png"), "--recursive")

    run = snapcap("caption", *operands, "--output", str(output), *compiled_options)
    assert run.returncode == 1
    assert run.stdout == ""
    errors = {
        "drawing.dat": f"error: SVG images are not read; convert it to {readable()}",
        "gone.png": "error: No such file or directory",
        "broken.png": "error: the PNG data is incomplete or damaged; send the whole file",
        "text.jpg": f"error: the data is not an image; send {readable()}",
    }
    assert read(output) == expected | errors
    failed = [line for line in run.stderr.splitlines() if line.startswith("snapcap: ")]
    assert failed == [
        f"snapcap: {folder}/drawing.dat: SVG images are not read; convert it to {readable()}",
        f"snapcap: {folder}/gone.png: No such file or directory",
        f"snapcap: {folder}/broken.png: the PNG data is incomplete or damaged; send the whole file",
        f"snapcap: {folder}/text.jpg: the data is not an image; send {readable()}",
    ]
    assert "captions=12 failed=4" in run.stderr
    assert f'not_pictures=1 left_out="{folder}/notes.md"' in run.stderr

    refused = snapcap("caption", str(folder), "--output", str(output), *compiled_options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith(
        "has captions: --resume keeps them and adds the others, --overwrite replaces them\n"
    )

    (folder / "broken.png").unlink()
    (folder / "text.jpg").unlink()
    (folder / "drawing.dat").unlink()
    resumed = snapcap("caption", str(folder), "-r", "--resume", "-o", str(output), "--model", "no-such-folder/x")
    assert resumed.returncode == 0, resumed.stderr  # all is there: no model is needed
    assert read(output) == expected | errors


def test_a_folder_to_parquet(photos: tuple[Path, dict[str, str]], compiled_options: tuple[str, ...]) -> None:
    folder, expected = photos
    output = folder / "captions.parquet"
    run = snapcap("caption", str(folder), "--recursive", "--output", str(output), *compiled_options)
    assert run.returncode == 1, run.stderr
    table = parquet.read_table(output)
    assert table.schema.names == ["file_name", "caption", "error"]
    found = outcomes(table.to_pylist())
    assert {name for name, each in found.items() if each.startswith("error: ")} == {
        "broken.png",
        "text.jpg",
        "drawing.dat",
    }
    assert {name: each for name, each in found.items() if name in expected} == expected
    assert "not_pictures=1" in run.stderr, "the output is its own"


def test_sidecars(photos: tuple[Path, dict[str, str]], compiled_options: tuple[str, ...]) -> None:
    folder, expected = photos
    names = sorted(name for name in expected if "/" not in name)
    (folder / "one-2.txt").write_text("by hand\n")
    run = snapcap("caption", str(folder), "--sidecar", "--resume", "--log-format", "json", *compiled_options)
    assert run.returncode == 1
    assert run.stdout == ""
    for name in names:
        sidecar = (folder / name).with_suffix(".txt")
        assert sidecar.read_text() == ("by hand" if name == "one-2.png" else expected[name]) + "\n"
    assert sorted(path.name for path in folder.glob(".*")) == ["._one-2.png"]  # no part of a file
    log = [json.loads(line) for line in run.stderr.splitlines()]
    assert [Path(line["file"]).name for line in log if line["message"] == "no caption"] == [
        "drawing.dat",
        "broken.png",
        "text.jpg",
    ]
    (summary,) = [line for line in log if line["message"] == "captioned"]
    assert (summary["not_pictures"], Path(summary["left_out"]).name) == (1, "notes.md"), "sidecars are its own"


@pytest.mark.parametrize(("folder", "output"), [(".", "c.csv"), ("../{}", "c.csv"), (".", "../{}/c.csv")])
def test_a_file_of_captions_is_its_own_however_it_is_named(folder: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "c.csv").write_text("file_name,caption,error\r\na.png,x,\r\n")
    (tmp_path / "notes.md").touch()
    operands = [each.format(tmp_path.name) for each in (folder, "-o", output)]
    program = f"import os, sys; os.chdir({str(tmp_path)!r}); from snapcap.service.cli.main import main\n"
    run = python("-c", f"{program}main(['caption', '--resume', *sys.argv[1:]])", *operands)
    assert run.returncode == 0, run.stderr
    assert "there_already=1 not_pictures=1 left_out=" in run.stderr


def test_a_list_on_standard_input_and_lines_on_standard_output(
    samples: dict[Path, str], compiled_options: tuple[str, ...]
) -> None:
    names = b"".join(os.fsencode(path) + b"\n" for path in samples)
    command = [sys.executable, "-m", "snapcap", "caption", "-", *compiled_options]
    run = subprocess.run(
        command, input=names, env=clean_environment(), capture_output=True, timeout=300, check=True
    )
    lines = dict(line.split("\t") for line in run.stdout.decode().splitlines())
    assert lines == {str(path): caption for path, caption in samples.items()}
    assert b"captions=12 failed=0" in run.stderr


def test_interrupted_killed_and_resumed(many: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, expected = many
    output = tmp_path / "captions.jsonl"
    arguments = ("caption", str(folder), "--output", str(output), "--sidecar", *EAGER)

    def interrupt(number: int, *more: str) -> tuple[int, str]:
        """Send a signal as soon as there is one caption more."""
        process = subprocess.Popen(
            [sys.executable, "-m", "snapcap", *arguments, *more],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        before = output.stat().st_size if output.exists() else 0
        wait_for(lambda: process.poll() is not None or (output.exists() and output.stat().st_size > before))
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors

    def sidecars() -> dict[str, str]:
        return {path.stem: path.read_text() for path in folder.glob("*.txt")}

    status, errors = interrupt(signal.SIGINT)
    assert status == 130, errors
    assert errors.endswith(
        "snapcap: interrupted; written captions are kept, and --resume continues a run that writes files\n"
    )
    assert "Traceback" not in errors
    first = read(output)
    assert 0 < len(first) < len(expected)
    assert sidecars() == {Path(name).stem: f"{caption}\n" for name, caption in first.items()}

    assert interrupt(signal.SIGKILL, "--resume")[0] == -signal.SIGKILL
    assert interrupt(signal.SIGTERM, "--resume")[0] == 143
    second = read(output)
    assert len(first) < len(second) < len(expected)

    run = snapcap(*arguments, "--resume")
    assert run.returncode == 0, run.stderr
    assert {Path(name).name: caption for name, caption in read(output).items()} == expected
    assert sidecars() == {Path(name).stem: f"{caption}\n" for name, caption in expected.items()}


def test_a_bar_on_a_terminal(samples: dict[Path, str], tmp_path: Path) -> None:
    folder = next(iter(samples)).parent
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "snapcap",
            "caption",
            str(folder),
            "-o",
            str(tmp_path / "c.jsonl"),
            "--cache-dir",
            str(tmp_path),
            *EAGER,
        ],
        env=clean_environment(TERM="xterm", COLUMNS="120"),
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # EIO: the process has closed its side
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 0, shown
    text = shown.decode()
    assert "12/12" in text
    assert "/s" in text
    assert "starting" in text
    (logged,) = [each for each in re.split(r"[\r\n]+", text) if "prepared weights" in each]
    assert "starting" not in logged, "a line of the log stands above the bar and not behind it"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--resume",), "--resume needs a file to write to: add --output FILE or --sidecar"),
        (("--overwrite", "-o", "-"), "--overwrite needs a file to write to: add --output FILE or --sidecar"),
        (
            ("--resume", "--overwrite", "--sidecar"),
            "--resume keeps existing captions and --overwrite replaces them: give one of the two",
        ),
        (
            ("-o", "captions.xlsx"),
            "--output captions.xlsx has no known format: end the name with one of .jsonl, .ndjson, .csv, .parquet",
        ),
        (
            ("-o", "s3://bucket/captions.csv"),
            "--output s3://bucket/captions.csv is a URL: give a file, and upload it when it is written",
        ),
        (
            ("https://example.org/a.jpg",),
            "https://example.org/a.jpg is a URL, and only files are read: download it first, or send it to the "
            "chat API of a server",
        ),
        (("",), "IMAGE is empty: name a picture, a folder or a pattern, or - for a list"),
        (("-o", "c.PARQUET"), "--output c.PARQUET needs pyarrow: pip install 'snapcap[parquet]'"),
    ],
)
def test_options_that_do_not_fit(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["caption", "a.png", *arguments]) == 2
    assert capsys.readouterr().err == f"snapcap: {line}\n"


def test_captions_by_beam_search(samples: dict[Path, str], compiled_options: tuple[str, ...]) -> None:
    options = (
        "--num-beams",
        "3",
        "--length-penalty",
        "2",
        "--early-stopping",
        "never",
        "--no-repeat-ngram-size",
        "3",
    )
    run = snapcap("caption", *map(str, samples), *options, *compiled_options)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{path}\t{caption}" for path, caption in samples.items()]
    shorter = ("--max-chars", "16", "--trim-lead", "true")
    shortened = snapcap("caption", *map(str, samples), *shorter, *compiled_options)
    for line, (path, caption) in zip(shortened.stdout.splitlines(), samples.items(), strict=True):
        assert line == f"{path}\t{caption[:17].rpartition(' ')[0]}"
    run = snapcap("caption", str(next(iter(samples))), "--num-beams", "5", *compiled_options)
    assert run.returncode == 2
    assert "must be at most 4, the rows of this server's largest bucket" in run.stderr


def test_nothing_is_written_when_the_model_cannot_do_it(
    samples: dict[Path, str], compiled_options: tuple[str, ...], tmp_path: Path
) -> None:
    output = tmp_path / "c.jsonl"
    output.write_text('{"file_name": "a.png", "caption": "kept"}\n')
    image = str(next(iter(samples)))
    run = snapcap("caption", image, "-o", str(output), "--overwrite", "--prompt", "a red " * 200, *compiled_options)
    assert run.returncode == 2
    assert "The prompt has" in run.stderr
    assert read(output) == {"a.png": "kept"}
    run = snapcap("caption", image, "-o", str(output), "--overwrite", "--model", str(tmp_path / "nowhere"))
    assert run.returncode == 3
    assert run.stderr.startswith("snapcap: ")
    assert read(output) == {"a.png": "kept"}


def test_a_lost_engine_has_an_exit_status_of_its_own(samples: dict[Path, str], tmp_path: Path) -> None:
    program = """
import sys
from snapcap.service.cli.main import main
from snapcap.service.engine.engine import Engine
def lost(*_): raise RuntimeError("the device fell off the bus")
Engine._encode = lost
main(["caption", *sys.argv[1:]])
"""
    output = tmp_path / "c.csv"
    arguments = ("--output", str(output), "--backend", "eager", "--buckets", "1")
    run = python("-c", program, *map(str, samples), *arguments, timeout=300)
    assert run.returncode == 4, run.stderr
    assert "the device failed 3 times in a row" in run.stderr.splitlines()[-1]
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    assert all(row["error"] and not row["caption"] for row in rows)


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)
