"""What is counted while a server builds: requests, failures, and when everything was compiled."""

from typing import Any, cast

import pytest

from snapcap.benchmarks.harness.server import Reply, Server
from snapcap.benchmarks.harness.workload import Workload, open_workload
from snapcap.benchmarks.startup import bench


class Connection:
    def close(self) -> None:
        pass


class Building:
    """A server whose /startup goes through the given reports, one a look, and whose captions may fail."""

    def __init__(self, reports: list[dict[str, Any]], caption: str) -> None:
        self._reports = reports
        self._caption = caption
        self._asked = 0

    def seconds(self) -> float:
        return float(self._asked)

    def connect(self) -> Connection:
        return Connection()

    def caption(self, connection: Connection, image: bytes) -> Reply:
        return Reply(200, b'{"caption": "%s"}' % self._caption.encode())

    def get(self, path: str) -> Reply:
        report = self._reports[min(self._asked, len(self._reports) - 1)]
        self._asked += 1
        return Reply(200, str(report).replace("'", '"').encode())

    def metrics(self) -> dict[str, float]:
        return {"snapcap_bucket_swaps_total": 2.0, "other": 1.0}


def report(backend: str, state: str) -> dict[str, Any]:
    return {"buckets": [{"backend": backend}], "build": {"state": state}}


@pytest.fixture
def workload(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Workload:
    monkeypatch.setattr(bench, "POLL_S", 0.08)
    monkeypatch.setattr(bench, "PAUSE_S", 0.01)
    return open_workload("demo", tmp_path_factory.mktemp("cache"))


def test_it_ends_when_everything_is_compiled_and_published(workload: Workload) -> None:
    right = str(workload.first_image[1])
    server = Building([report("eager", "building"), report("aot", "building"), report("aot", "published")], right)
    found = bench.until_compiled(cast("Server", server), workload, 100.0)
    assert (found["all_compiled"], found["build"]) == (2.0, {"state": "published"})
    assert found["requests"] > 0
    assert found["failed"] == 0
    assert found["swaps"] == {"snapcap_bucket_swaps_total": 2.0}


def test_wrong_captions_are_failures(workload: Workload) -> None:
    server = Building([*[report("eager", "building")] * 3, report("aot", "published")], "something else")
    found = bench.until_compiled(cast("Server", server), workload, 100.0)
    assert found["failed"] == found["requests"] > 0
    assert "a wrong caption" in found["failures"][0]


def test_a_build_that_takes_too_long_is_reported_as_not_done(workload: Workload) -> None:
    server = Building([report("eager", "building")] * 100, str(workload.first_image[1]))
    found = bench.until_compiled(cast("Server", server), workload, 4.0)
    assert found["all_compiled"] is None
    assert found["build"] == {"state": "building"}


def test_a_start_that_does_not_build_is_an_error(workload: Workload) -> None:
    server = Building([report("eager", "declined")], "")
    with pytest.raises(RuntimeError, match="declined"):
        bench.until_building(cast("Server", server))
