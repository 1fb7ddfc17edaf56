"""The bar of `snapcap build` and `snapcap caption`: one line at any width, its numbers whole."""

import io

import pytest
from rich.console import Console

from snapcap.service.offline.progress import open_bar


def shown(width: int, text: str, done: int, total: int | None, seconds: float = 100.0, *, rate: bool) -> list[str]:
    """Lines of a bar that has run for some seconds."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    now = [0.0]
    bar = open_bar(console, rate=rate)
    bar.get_time = lambda: now[0]
    task = bar.add_task(text, total=total)
    for step in range(1, 11):
        now[0] = seconds * step / 10
        bar.update(task, completed=done * step // 10)
    console.print(bar.get_renderable())
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize(
    ("text", "done", "total", "rate", "numbers"),
    [
        ("checking decoder_penalties × 8", 9, 18, False, "9/18 0:01:40"),
        (
            "123 failed, vit-gpt2-image-captioning on cpu, aot",
            50_000,
            100_000,
            True,
            "50000/100000 500.0/s 0:01:40",
        ),
    ],
)
def test_a_bar_is_one_line_and_its_numbers_are_whole(
    width: int, text: str, done: int, total: int, rate: bool, numbers: str
) -> None:
    (line,) = shown(width, text, done, total, rate=rate)
    assert len(line) == width
    assert " ".join(line[line.rindex("━") + 1 :].split()).startswith(f"{numbers} 0:0")
    assert line.endswith(" left")
    if width == 200:
        assert line.startswith(text)
    else:
        assert line.startswith(text[:3])
    assert line.count("━") >= 4


def test_what_has_no_end_yet_has_no_numbers_of_it() -> None:
    (line,) = shown(80, "starting", 0, None, rate=True)
    assert len(line) == 80
    assert line.startswith("starting ")
    assert "?" not in line
    assert "left" not in line


def test_a_bar_has_its_width_from_the_beginning() -> None:
    (line,) = shown(80, "compiling", 0, 9, rate=False)
    assert len(line) == 80
    assert "0/9" in line
