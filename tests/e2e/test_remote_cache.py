"""torch's remote caches in a real Redis: what one process has compiled, the next one finds there."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.build_folders import nearly_built
from support.servers.server_process import clean_environment, snapcap

from snapcap.warmup.build.environment import remote_cache_environment
from snapcap.warmup.errors import StartError

TESTS = Path(__file__).parents[1]


def compile_regions(folder: Path, *address: str) -> dict[str, Any]:
    """A jit start of three small graphs, with no artifacts and an empty cache folder."""
    run = subprocess.run(
        [sys.executable, "-m", "support.checkpoints.jit_regions", str(folder), *address],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert run.returncode == 0, run.stderr
    counts: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])["counts"]
    return counts


def test_a_second_jit_start_finds_every_graph_in_redis(redis_server: str, tmp_path: Path) -> None:
    import redis

    with redis.Redis.from_url(redis_server) as client:
        assert compile_regions(tmp_path, redis_server) == {"hits": 0, "misses": 6, "bypasses": 0}
        kinds = sorted({key.split(b"::")[0] for key in client.scan_iter()})
        assert kinds == [b"pt2:autograd-experimental", b"pt2:fx-graph-v1"]
        assert (client.dbsize(), client.info("stats")["keyspace_hits"]) == (6, 0)

        assert compile_regions(tmp_path, redis_server) == {"hits": 6, "misses": 0, "bypasses": 0}
        assert (client.dbsize(), client.info("stats")["keyspace_hits"]) == (6, 6)


def test_a_build_without_redis_warns_and_goes_on(built_cache: Path, tmp_path: Path) -> None:
    nearly_built(built_cache, tmp_path / "store")
    options = (
        "--cache-dir",
        str(tmp_path),
        "--buckets",
        "1,4",
        "--remote-cache",
        "redis://user:secret@127.0.0.1:1",
    )
    built = snapcap("build", *options)
    assert built.returncode == 0, built.stderr
    assert "remote cache not used: Redis does not answer" in built.stderr
    assert "redis://127.0.0.1:1" in built.stderr
    assert "secret" not in built.stderr


@pytest.mark.parametrize(
    ("device", "caches"),
    [("cpu", ["AUTOGRAD", "FX_GRAPH"]), ("cuda:0", ["AUTOGRAD", "AUTOTUNE", "FX_GRAPH"])],
)
def test_the_compilers_get_the_address_with_time_limits(redis_server: str, device: str, caches: list[str]) -> None:
    variables = remote_cache_environment(f"{redis_server}/0?socket_timeout=3", device)
    address = variables.pop("TORCHINDUCTOR_REDIS_URL")
    assert address == f"{redis_server}/0?socket_connect_timeout=2&socket_timeout=3"
    assert set(variables.values()) == {"1"}
    assert sorted(variables) == [f"TORCHINDUCTOR_{cache}_REMOTE_CACHE" for cache in caches]


def test_a_host_that_never_answers_is_given_up(black_hole: str, caplog: pytest.LogCaptureFixture) -> None:
    address = black_hole.replace("http://", "redis://") + "?socket_timeout=0.2"
    with caplog.at_level(logging.WARNING, "snapcap.build"):
        assert remote_cache_environment(address, "cpu") == {}
    assert [record.message for record in caplog.records] == ["remote cache not used: Redis does not answer"]


def test_without_an_address_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    assert remote_cache_environment("", "cpu") == {}
    with pytest.raises(StartError, match=r"needs the package redis; run: pip install 'snapcap\[redis\]'"):
        remote_cache_environment("redis://127.0.0.1", "cpu")


@pytest.mark.parametrize("address", ["http://127.0.0.1", "127.0.0.1:6379", "redis://127.0.0.1:none", "redis://["])
def test_another_address_stops_the_start(address: str) -> None:
    with pytest.raises(StartError, match=r"^--remote-cache"):
        remote_cache_environment(address, "cpu")
