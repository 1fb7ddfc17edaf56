"""Servers that start cold on one store: one of them builds, whoever is killed is replaced, the others take it over.

The build folders hold all packages but one, so that each test compiles one package instead of all, or none where no
other server is to be faster.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.checkpoints.build_folders import LEFT_OUT, PACKAGES, nearly_built
from support.checkpoints.compilers import WaitingCompiler
from support.servers import s3_servers
from support.servers.server_process import ServerProcess, clean_environment, snapcap

from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import client

BUCKETS = ("--buckets", "1,4")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(500)  # compiling


def build_state(server: ServerProcess) -> str:
    return str((server.startup()["build"] or {}).get("state"))


def backends(server: ServerProcess) -> set[tuple[str, str]]:
    return {(bucket["backend"], bucket["state"]) for bucket in server.startup()["buckets"]}


@pytest.fixture
def compiler(tmp_path: Path) -> WaitingCompiler:
    """The compiler of a test's builders, which waits until every server has looked at the store."""
    return WaitingCompiler.make(tmp_path / "compiler")


def start_all(commands: list[tuple[str, ...]], samples: dict[Path, str], compiler: WaitingCompiler) -> list[str]:
    """Start cold servers at once; returns how the build ended in each, when all serve compiled code."""
    path, caption = next(iter(samples.items()))
    with ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(*command, CXX=str(compiler.path))) for command in commands]
        for server in servers:
            assert server.wait_ready().startup()["tier"] == "eager"
            assert server.caption(path)["caption"] == caption
        compiler.let_go()
        for server in servers:
            server.wait_for(lambda server=server: build_state(server) in ("published", "fetched"), seconds=400)
            assert backends(server) == {("aot", "warm")}
            reply = server.caption(path)
            assert (reply["caption"], reply["backend"]) == (caption, "aot")
        ends = [build_state(server) for server in servers]
    for server, end in zip(servers, ends, strict=True):
        # "building" names the package count and is logged by whoever begins to build.
        assert (f" building packages={PACKAGES} " in server.log()) == (end == "published")
    return sorted(ends)


def test_servers_that_start_cold_on_one_folder_build_once(
    built_cache: Path, tmp_path: Path, samples: dict[Path, str], compiler: WaitingCompiler
) -> None:
    nearly_built(built_cache, tmp_path / "shared")
    commands = [
        ("--store", str(tmp_path / "shared"), "--cache-dir", str(tmp_path / str(number)), *BUCKETS)
        for number in range(3)
    ]
    assert start_all(commands, samples, compiler) == ["fetched"] * 2 + ["published"]


@pytest.mark.parametrize("s3_kind", [s3_servers.REAL])
def test_servers_that_start_cold_on_one_bucket_build_once(
    request: pytest.FixtureRequest,
    s3_kind: str,
    built_cache: Path,
    tmp_path: Path,
    samples: dict[Path, str],
    compiler: WaitingCompiler,
) -> None:
    request.getfixturevalue("ceph_environment" if s3_kind == "ceph" else "aws_environment")
    endpoint = request.getfixturevalue("ceph_server" if s3_kind == "ceph" else "s3_server")
    bucket, key = f"fleet-{uuid4().hex}", tmp_path / "artifacts.key"
    client(S3Options(endpoint_url=endpoint, region="us-east-1")).create_bucket(Bucket=bucket)
    assert snapcap("keygen", str(key)).returncode == 0
    remote = ("--store", f"s3://{bucket}/fleet", "--s3-endpoint-url", endpoint, "--s3-region", "us-east-1")
    keys = ("--sign-key", str(key), "--trusted-key", f"{key}.pub")
    commands = []
    for number in range(3):
        nearly_built(built_cache, tmp_path / str(number) / "store")
        commands.append((*remote, *keys, "--cache-dir", str(tmp_path / str(number)), *BUCKETS))
    assert start_all(commands, samples, compiler) == ["fetched"] * 2 + ["published"]
    with ServerProcess(*commands[0][:-4], "--cache-dir", str(tmp_path / "new"), *BUCKETS) as server:
        assert server.wait_ready().startup()["tier"] == "aot"


def test_build_local_builds_without_a_key_and_leaves_the_bucket_alone(
    aws_environment: None,
    s3_server: str,
    built_cache: Path,
    tmp_path: Path,
    samples: dict[Path, str],
    compiler: WaitingCompiler,
) -> None:
    bucket = f"local-{uuid4().hex}"
    s3 = client(S3Options(endpoint_url=s3_server, region="us-east-1"))
    s3.create_bucket(Bucket=bucket)
    nearly_built(built_cache, tmp_path / "store")
    remote = ("--store", f"s3://{bucket}/a", "--s3-endpoint-url", s3_server, "--s3-region", "us-east-1")
    options = ("--allow-unsigned", "--build", "local", "--cache-dir", str(tmp_path), *BUCKETS)
    assert start_all([(*remote, *options)], samples, compiler) == ["published"]
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


_BUILDER = """
import sys, threading
from concurrent.futures import Future
from pathlib import Path
from snapcap.warmup.start import background_build
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.start.start import load
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

cache, status = Path(sys.argv[1]), StartupStatus()
options = StartOptions(ModelOptions(cache_dir=cache), ComputeOptions(buckets=(1, 4)))
loaded = load(options, Timeline.since_exec(), status)

def on_device(work):
    done = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done

background_build.POLL_SECONDS, background_build.LEASE_SECONDS = 0.5, 3
build = background_build.BackgroundBuild(loaded, options, status, on_device)
build.start()
seen = None
while seen not in ("published", "fetched", "failed"):
    state = (status.to_dict()["build"] or {}).get("state")
    if state != seen:
        seen = state
        print(seen, status.backend, flush=True)
    threading.Event().wait(0.05)
"""


@pytest.fixture
def builders() -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that are killed at the end."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_a_builder_that_was_killed_is_taken_over_when_its_lease_has_expired(
    built_cache: Path, tmp_path: Path, builders: list[Any], compiler: WaitingCompiler
) -> None:
    build = nearly_built(built_cache, tmp_path / "store")

    def start(**environment: str) -> "subprocess.Popen[str]":
        command, variables = [sys.executable, "-c", _BUILDER, str(tmp_path)], clean_environment(**environment)
        builders.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return builders[-1]

    def states(process: "subprocess.Popen[str]") -> Iterator[str]:
        assert process.stdout is not None
        return (line.split()[0] for line in process.stdout if not line.startswith("None"))

    first = start(CXX=str(compiler.path))  # which builds until it is killed
    assert next(states(first)) == "building"
    second = start()
    assert next(states(second)) == "waiting"
    os.kill(first.pid, signal.SIGKILL)
    assert list(states(second)) == ["building", "published"]
    assert (build / f"{LEFT_OUT}.json").exists()
    assert second.wait(timeout=60) == 0
