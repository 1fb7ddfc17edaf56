"""Pictures: written where matplotlib is, refused with the way to get it where it is not."""

import sys
from pathlib import Path

import pytest

from snapcap.benchmarks.waterfall import (
    Bar,
    ChartsError,
    Segment,
    draw_waterfall,
    require_matplotlib,
)

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_waterfall_is_a_png(tmp_path: Path) -> None:
    segments = [Segment("import_torch", 0.0, 1.0), Segment("warm", 1.0, 1.5)]
    file = tmp_path / "new" / "start.png"
    draw_waterfall([Bar("ours", segments, 1.4, 5), Bar("floor", segments[:1], None, 5)], file, "demo on cpu")
    assert file.read_bytes().startswith(PNG)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ChartsError, match=r"snapcap\[bench\]"):
        require_matplotlib()
