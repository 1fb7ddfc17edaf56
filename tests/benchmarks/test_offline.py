"""Captions without a server: what is run, and what counts as a result."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from snapcap.benchmarks.contenders import Contenders
from snapcap.benchmarks.harness.workload import fresh_caches, open_workload
from snapcap.benchmarks.startup import LIBRARY, Bench, caption_once


def test_the_library_captions_in_a_process_of_its_own(tmp_path: Path) -> None:
    """In a process of its own, on whatever backend there is."""
    workload = open_workload("demo", tmp_path)
    with ExitStack() as stack:
        images = workload.write_images(tmp_path / "images")
        contenders = Contenders(workload, "cpu", tmp_path / "sets", images, (), float("inf"))
        start = Bench(contenders, False, tmp_path, stack).start(LIBRARY)
    assert start.total > 0
    assert sum(segment.seconds for segment in start.segments) == pytest.approx(start.total)


@pytest.mark.parametrize(
    ("program", "said"), [("raise SystemExit(3)", "status 3"), ("print('a cat')", "a wrong caption: .*a cat")]
)
def test_what_fails_or_is_wrong_is_no_result(program: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=said):
        caption_once((sys.executable, "-c", program), "a dog", fresh_caches(tmp_path))
