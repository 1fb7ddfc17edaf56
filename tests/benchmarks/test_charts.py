"""Pictures: written where matplotlib is, refused with the way to get it where it is not."""

import struct
import sys
from pathlib import Path

import pytest

from snapcap.benchmarks.report.charts import (
    Bar,
    ChartsError,
    Line,
    Segment,
    draw_bars,
    draw_latency,
    draw_waterfall,
    require_matplotlib,
)

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_waterfall_is_a_png(tmp_path: Path) -> None:
    segments = [Segment("import_torch", 0.0, 1.0), Segment("warm", 1.0, 1.5)]
    file = tmp_path / "new" / "start.png"
    draw_waterfall([Bar("ours", segments, 1.4, 5), Bar("floor", segments[:1], None, 5)], file, "demo on cpu")
    assert file.read_bytes().startswith(PNG)


def test_starts_of_very_different_length_are_drawn_on_two_axes(tmp_path: Path) -> None:
    short, long = [Segment("import_torch", 0.0, 1.0)], [Segment("compile", 0.0, 60.0)]
    two = [Bar("ours", short, 0.9, 5), Bar("floor", short, None, 5)]
    draw_waterfall(two, tmp_path / "one.png", "demo on cpu")
    draw_waterfall([*two, Bar("theirs", long, None, 1)], tmp_path / "two.png", "demo on cpu")
    heights = [struct.unpack(">I", (tmp_path / name).read_bytes()[20:24])[0] for name in ("one.png", "two.png")]
    assert heights[1] > heights[0] + 100


def test_a_latency_chart_and_rates_are_pngs(tmp_path: Path) -> None:
    draw_latency([Line("ours", [(1, 10.0, 12.0), (4, 20.0, 31.0)])], tmp_path / "latency.png", "demo on cpu")
    draw_bars({"snapcap, aot": 100.0, "peer": 12.0}, tmp_path / "rates.png", "captions/s")
    for name in ("latency.png", "rates.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ChartsError, match=r"snapcap\[bench\]"):
        require_matplotlib()
