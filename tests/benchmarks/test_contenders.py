"""Who is under load, and who is named because they were not."""

import contextlib
import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from snapcap.benchmarks.harness.server import Server
from snapcap.benchmarks.harness.workload import Workload
from snapcap.benchmarks.load.contenders import Contenders, HttpLoad
from snapcap.benchmarks.load.throughput import Servers


class Load:
    """The second server's turn is interrupted, as by Ctrl-C."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, server: Server) -> dict[str, float]:
        self.runs += 1
        if self.runs == 2:
            raise KeyboardInterrupt
        return {"captions_per_s": 1.0}


def test_a_server_whose_turn_never_came_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = Contenders(cast(Workload, None), "cpu", tmp_path, tmp_path, (), float("inf"))

    @contextlib.contextmanager
    def serving(name: str) -> Iterator[Any]:
        yield name

    monkeypatch.setattr(contenders, "serving", serving)
    monkeypatch.setattr(contenders, "first_caption", lambda server: io.BytesIO())
    monkeypatch.setattr("snapcap.benchmarks.load.throughput.replace", lambda load, seconds: Warm())
    with ExitStack() as stack:
        servers = Servers(contenders, stack)
        servers.open(["aot", "onnxruntime", "eager"], cast(HttpLoad, Load()))
        results = servers.run(cast(HttpLoad, Load()), rounds=1)
    assert list(results) == ["aot"]
    assert contenders.problems == dict.fromkeys(("onnxruntime", "eager"), "not measured: interrupted")


class Warm:
    def run(self, server: Server) -> dict[str, float]:
        return {}
