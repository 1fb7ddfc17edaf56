"""The jit backend in real processes: one compiles and publishes, the next one compiles nothing."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.servers.server_process import ServerProcess, snapcap

JIT = ("--backend", "jit", "--buckets", "2")  # a request alone runs beside a padding row
pytestmark = pytest.mark.timeout(600)
GRAPHS = 6  # regions, all but those on demand; `test_jit_backend` has several buckets
COMPILED = 'snapcap_compile_events_total{{when="{}"}}'
CACHE = 'snapcap_compile_cache_total{{result="{}"}}'


class Served(NamedTuple):
    """What a server said of itself after it had captioned every sample."""

    cache: Path
    startup: dict[str, Any]
    metrics: dict[str, float]
    captions: dict[Path, str]
    compiled: list[str]


def total(served: Served, counter: str) -> float:
    """Over all labels."""
    return sum(value for name, value in served.metrics.items() if name.partition("{")[0] == counter)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C++ compiler that writes down how it is called; in one place for all, as it is part of torch's keys."""
    path = tmp_path_factory.mktemp("compiler") / "g++"
    path.write_text(f'#!/bin/sh\necho "$@" >> "${{COMPILER_LOG:-/dev/null}}"\nexec {shutil.which("g++")} "$@"\n')
    path.chmod(0o755)
    return path


def serve(cache: Path, samples: dict[Path, str], compiler: Path, temporary: Path) -> Served:
    log = temporary / "compiler.log"
    environment = {"CXX": str(compiler), "COMPILER_LOG": str(log), "TMPDIR": str(temporary)}
    with ServerProcess(*JIT, "--strict", "--cache-dir", str(cache), **environment) as server:
        server.wait_for(lambda: server.call("/readyz")[0] == 200, seconds=500)  # compiling
        startup = server.startup()
        replies = {path: server.caption(path) for path in samples}
        assert {reply["backend"] for reply in replies.values()} == {"jit"}
        captions = {path: reply["caption"] for path, reply in replies.items()}
        metrics = server.metrics()
    return Served(cache, startup, metrics, captions, calls_to_compile(log))


def calls_to_compile(log: Path) -> list[str]:
    """Calls of the compiler that asked for more than what it is."""
    asked = ("--version", "-v", "-dumpversion", "-dumpmachine")
    return [line for line in log.read_text().splitlines() if line not in asked]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory, samples: dict[Path, str], compiler: Path) -> Served:
    """A start with an empty store, which has published by now."""
    return serve(tmp_path_factory.mktemp("cold"), samples, compiler, tmp_path_factory.mktemp("tmp"))


@pytest.fixture(scope="module")
def restored(
    tmp_path_factory: pytest.TempPathFactory, cold: Served, samples: dict[Path, str], compiler: Path
) -> Served:
    """The next start on the same store; all it has of the first one are its artifacts."""
    return serve(cold.cache, samples, compiler, tmp_path_factory.mktemp("tmp"))


def test_a_start_without_artifacts_compiles_and_publishes(cold: Served) -> None:
    assert (cold.startup["tier"], cold.startup["artifacts"]["kind"]) == ("jit", "jit")
    assert cold.metrics['snapcap_artifact_requests_total{kind="jit",result="miss"}'] == 1
    assert cold.metrics['snapcap_artifact_publish_total{result="published"}'] == 1
    assert cold.metrics[CACHE.format("miss")] == 2 * GRAPHS
    assert cold.metrics[COMPILED.format("startup")] == GRAPHS
    assert len(cold.compiled) > GRAPHS


def test_the_next_start_misses_nothing_and_publishes_nothing(restored: Served) -> None:
    assert (restored.startup["tier"], restored.startup["artifacts"]["result"]) == ("jit", "hit")
    assert restored.metrics['snapcap_artifact_requests_total{kind="jit",result="hit"}'] == 1
    assert (restored.metrics[CACHE.format("hit")], restored.metrics[CACHE.format("miss")]) == (2 * GRAPHS, 0)
    assert restored.metrics[CACHE.format("bypass")] == 0
    assert restored.compiled == []
    assert total(restored, "snapcap_artifact_publish_total") == 0


@pytest.mark.parametrize("start", ["cold", "restored"])
def test_every_bucket_is_warm_and_nothing_compiles_while_it_serves(
    start: str, samples: dict[Path, str], request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(start)
    buckets = served.startup["buckets"]
    assert {(bucket["backend"], bucket["state"]) for bucket in buckets} == {("jit", "warm")}
    assert "import_compiler" in [phase["name"] for phase in served.startup["phases"]]
    assert served.captions == samples  # as eager
    assert served.metrics[COMPILED.format("serving")] == 0
    assert total(served, "snapcap_eager_fallbacks_total") == 0


def test_explain_looks_for_the_kind_of_the_backend(cold: Served, compiler: Path) -> None:
    hit = snapcap("explain", "--all", *JIT, "--cache-dir", str(cold.cache), CXX=str(compiler))
    assert (hit.returncode, "result hit" in hit.stdout) == (0, True), hit.stderr
    assert ["kind", "jit"] in [line.split() for line in hit.stdout.splitlines()]
    miss = snapcap("explain", *JIT[2:], "--cache-dir", str(cold.cache))
    assert (miss.returncode, "result miss" in miss.stdout) == (1, True)
    other = snapcap("explain", *JIT, "--cache-dir", str(cold.cache), CXX="clang++-of-another-day")
    assert (other.returncode, "result stale" in other.stdout) == (1, True)
    assert "compiler is null here and" in other.stdout


def test_a_build_of_what_is_there_does_nothing_and_puts_it_into_s3(
    cold: Served, compiler: Path, aws_environment: None, s3_server: str, tmp_path: Path
) -> None:
    from snapcap.warmup.options import S3Options
    from snapcap.warmup.s3.client import client

    log = tmp_path / "compiler.log"
    environment = {"CXX": str(compiler), "COMPILER_LOG": str(log)}
    here = snapcap("build", *JIT, "--cache-dir", str(cold.cache), **environment)
    assert here.returncode == 0, here.stderr
    assert "nothing to do" in here.stderr

    s3 = client(S3Options(endpoint_url=s3_server, region="us-east-1"))
    s3.create_bucket(Bucket="jit")
    assert snapcap("keygen", str(tmp_path / "key")).returncode == 0
    there = ("--store", "s3://jit/a", "--s3-endpoint-url", s3_server, "--s3-region", "us-east-1")
    keys = ("--sign-key", str(tmp_path / "key"), "--trusted-key", str(tmp_path / "key.pub"))
    built = snapcap("build", *JIT, *there, *keys, "--cache-dir", str(cold.cache), **environment)
    assert built.returncode == 0, built.stderr
    assert "published: key" in built.stderr
    assert calls_to_compile(log) == []
    new = snapcap("explain", *JIT, *there, *keys[2:], "--cache-dir", str(tmp_path / "new"), **environment)
    assert (new.returncode, "fetched from s3://jit/a" in new.stdout) == (0, True), new.stdout


def test_a_flipped_byte_is_corrupt_and_the_start_compiles_instead(
    cold: Served, compiler: Path, tmp_path: Path
) -> None:
    shutil.copytree(cold.cache, tmp_path / "cache")
    blobs = tmp_path / "cache" / "store" / "blobs" / "sha256"
    largest = max(blobs.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with ServerProcess(*JIT, "--strict", "--cache-dir", str(tmp_path / "cache"), CXX=str(compiler)) as server:
        server.wait_for(lambda: server.call("/startup")[0] == 200 and server.startup()["artifacts"] is not None)
        assert server.startup()["artifacts"]["result"] == "corrupt"
        server.wait_for(lambda: server.startup()["phase"] == "warm_encoder")
        assert server.metrics()['snapcap_artifact_requests_total{kind="jit",result="corrupt"}'] == 1
        assert "artifacts restored" not in server.log()


def test_without_a_compiler_the_server_stays_eager_and_says_so(tmp_path: Path, samples: dict[Path, str]) -> None:
    path, caption = next(iter(samples.items()))
    with ServerProcess(*JIT, "--cache-dir", str(tmp_path), CXX="no-such-compiler") as server:
        startup = server.wait_ready().startup()
        assert startup["tier"] == "eager"
        assert "no C++ compiler (no-such-compiler)" in startup["build"]["error"]
        assert server.caption(path)["caption"] == caption
    strict = snapcap("serve", *JIT, "--strict", "--port", "0", "--cache-dir", str(tmp_path), CXX="no-such-compiler")
    assert strict.returncode == 3
    assert "the jit backend cannot compile: no C++ compiler (no-such-compiler)" in strict.stderr
