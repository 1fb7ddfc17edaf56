"""A terminal: lines that fit, colours, the picture of a start, and an address to open."""

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.server_process import clean_environment, wait_until

from snapcap.service.telemetry import terminal
from snapcap.service.telemetry.terminal import TerminalFormatter, address, paint, waterfall
from snapcap.warmup.progress.timeline import Phase

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WIDTH = 80


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(terminal, "columns", lambda: WIDTH)


def bars(phases: list[Phase], total: float) -> list[str]:
    return [line.split("│")[1] for line in waterfall(phases, total, 200).splitlines()]


def test_bars_stand_where_the_phases_were() -> None:
    first, second = bars([Phase("a", 0.0, 1.0), Phase("longer", 1.0, 2.0)], 2.0)
    half = len(first) // 2
    assert first == "█" * half + " " * half
    assert second == " " * half + "█" * half


def test_overlapping_phases_overlap_in_the_picture() -> None:
    first, second = bars([Phase("a", 0.0, 1.5), Phase("b", 0.5, 2.0)], 2.0)
    assert any(one == two == "█" for one, two in zip(first, second, strict=True))


def test_an_instant_is_still_seen_and_a_running_phase_ends_at_the_edge() -> None:
    instant, running = bars([Phase("a", 2.0, 2.0), Phase("b", 1.0, None)], 2.0)
    assert instant.count("█") == 1
    assert running.endswith("█")
    assert len(instant) == len(running)


def test_no_phases_no_lines() -> None:
    assert waterfall([], 1.0) == ""


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_the_width(width: int) -> None:
    phases = [Phase("load_libraries", 0.0, 123.4), Phase("b", 100.0, 123.4)]
    lines = waterfall(phases, 123.4, width).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= max(width, 56)  # with a bar of eight, below which it is none


def line_of(message: str, level: int = logging.INFO, **fields: Any) -> str:
    record = logging.LogRecord("snapcap.access", level, "", 0, message, None, None)
    record.fields = fields
    return TerminalFormatter().format(record)


REQUEST = {"method": "POST", "path": "/v1/caption", "status": 200, "ms": 12.34, "client": "127.0.0.1"}


def test_a_request_that_went_well_is_one_line() -> None:
    line = line_of("request", **REQUEST, tokens=6, queue_ms=0.2, request_id="a" * 32, trace_id="b" * 32)
    assert line[8:] == " POST /v1/caption 200 12.3 ms client=127.0.0.1 tokens=6 queue_ms=0.200"
    assert re.fullmatch(r"\d\d:\d\d:\d\d", line[:8])


def test_what_does_not_fit_goes_on_below_and_nothing_is_wider() -> None:
    refused = {**REQUEST, "status": 422, "request_id": "a" * 32, "code": "unprocessable_image"}
    lines = line_of("request", **refused, reason="x" * 300).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= WIDTH for line in lines)
    assert all(line.startswith(" " * 9) for line in lines[1:])
    assert "request_id=" + "a" * 32 in "".join(lines)
    assert lines[2].endswith("…")
    path = line_of("request", **{**REQUEST, "path": "/" + "a" * 5_000})
    assert all(len(line) <= WIDTH for line in path.splitlines())
    assert "\x1b" not in line_of("request", **{**REQUEST, "path": "/\x1b[2Jx"})


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paint("a", "31", {}) == "\x1b[31ma\x1b[0m"
    assert paint("a", "31", {"NO_COLOR": "1"}) == paint("a", "31", {"TERM": "dumb"}) == "a"
    assert paint("a", "31", {"NO_COLOR": ""}) != "a"  # as no-color.org has it
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    for level, status, colour in ((logging.ERROR, 500, "31"), (logging.WARNING, 404, "33")):
        line = line_of("request", level, **{**REQUEST, "status": status})
        assert f"\x1b[{colour}m{status}\x1b[0m" in line
        assert len(_COLOURS.sub("", line)) <= WIDTH
    assert "\x1b[31merror\x1b[0m" in line_of("failed", logging.ERROR, error="x")


@pytest.mark.parametrize(
    ("host", "link"),
    [
        ("0.0.0.0", "http://localhost:80/"),
        ("::", "http://localhost:80/"),
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("::1", "http://[::1]:80/"),
    ],
)
def test_the_address_can_be_opened(host: str, link: str) -> None:
    assert address(host, 80) == link


class Terminal:
    """`snapcap serve` at a terminal of 80 columns; what it shows."""

    def __init__(self, cache: Path, **environment: str) -> None:
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
        command = [sys.executable, "-m", "snapcap", "serve", "--backend", "eager", "--port", "0"]
        variables = clean_environment(**{"TERM": "xterm", **environment})
        variables = {name: value for name, value in variables.items() if value}
        self.process = subprocess.Popen([*command, "--cache-dir", str(cache)], env=variables, stderr=its)
        os.close(its)
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    @property
    def shown(self) -> str:
        return self._shown.decode("utf-8", "replace").replace("\r\n", "\n")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._reader.join(30)

    def _read(self, end: int) -> None:
        while True:
            try:
                data = os.read(end, 65536)
            except OSError:  # nobody has the other end any more
                os.close(end)
                return
            self._shown += data


@pytest.fixture(params=["colours", "no colours"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    server = Terminal(tmp_path, NO_COLOR="" if request.param == "colours" else "1")
    yield server
    server.process.kill()
    server.process.wait()


def test_a_start_at_a_terminal(served: Terminal, samples: dict[Path, str], request: pytest.FixtureRequest) -> None:
    wait_until(lambda: " ready " in _COLOURS.sub("", served.shown) or served.process.poll() is not None)
    link = re.findall(r"http://localhost:\d+/", served.shown)[0]
    with urllib.request.urlopen(f"{link}v1/caption", next(iter(samples)).read_bytes()) as reply:
        assert reply.status == 200
    wait_until(lambda: "/v1/caption" in served.shown)
    served.end()
    shown = _COLOURS.sub("", served.shown)
    assert (request.node.callspec.params["served"] == "colours") == (shown != served.shown)
    lines = shown.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    for phase in ("interpreter", "import_engine", "load_weights", "warm_encoder", "rehearsal"):
        assert len(re.findall(rf"\b{phase}\b", shown)) == 1
    assert any(
        re.search(rf" ready .*open={re.escape(link)}", each) for each in shown.replace("\n ", " ").splitlines()
    )
    assert any(" POST /v1/caption 200 " in line for line in lines)
    assert served.process.returncode == 0
