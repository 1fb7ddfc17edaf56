"""A build that is interrupted ends with all that it has started, and goes on where it was; what hangs is ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.checkpoints.build_folders import PACKAGES, nearly_built
from support.checkpoints.compilers import HangingCompiler
from support.servers.server_process import ServerProcess, clean_environment, snapcap, wait_until

from snapcap.benchmarks.harness.processes import descendants, is_gone
from snapcap.warmup.machine.worker import Worker, WorkerError
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.checkpoint import read_checkpoint
from snapcap.warmup.plan.plan import PlannedJob, make_plan

MISSING = ("aot/encoder_before.b1", "aot/decoder_after.b4")
LIMIT_S = 60  # on a busy machine a build of the lowest priority takes half of it to call a compiler
_ABORTS = "#include <cstdlib>\n__attribute__((constructor)) static void loaded() { abort(); }\n"


@pytest.mark.timeout(900)  # two builds
@pytest.mark.usefixtures("hung_for_long")  # the time limits of both pass during the tests before theirs
def test_a_build_that_was_killed_keeps_what_is_done(built_cache: Path, tmp_path: Path) -> None:
    build = nearly_built(built_cache, tmp_path / "store", MISSING)
    options = ("--cache-dir", str(tmp_path), "--buckets", "1,4", "--build-workers", "1")
    first, second = (build / f"{name}.json" for name in MISSING)
    compiler = HangingCompiler.make(tmp_path / "compiler", after_a_package=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "snapcap", "build", *options],
        env=clean_environment(CXX=str(compiler.path)),
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 400
        while not first.exists():
            assert process.poll() is None, "ended before anything was built"
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert not second.exists()
    assert not (tmp_path / "store" / "manifests").exists()

    again = snapcap("build", *options, timeout=400)
    assert again.returncode == 0, again.stderr
    events = [line.split()[0] for line in again.stderr.splitlines() if " × " in line]
    assert (events.count("kept"), events.count("built")) == (PACKAGES - 1, 1)
    assert "published: " in again.stderr
    assert snapcap("explain", *options[:4]).returncode == 0


def test_a_package_that_crashes_its_process_is_told_by_its_signal(built_cache: Path, tmp_path: Path) -> None:
    (build,) = (built_cache / "store" / "builds").iterdir()
    packages = tmp_path / "packages"
    shutil.copytree(build, packages)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", tmp_path / "abort.so"],
        input=_ABORTS,
        text=True,
        check=True,
    )
    whole, crashing = build / "aot" / "decoder_block.b1.pt2", packages / "aot" / "decoder_block.b1.pt2"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(crashing, "w") as target:
        libraries = [name for name in source.namelist() if name.endswith(".so")]
        assert len(libraries) == 1
        for member in source.infolist():
            data = (tmp_path / "abort.so").read_bytes() if member.filename in libraries else source.read(member)
            target.writestr(member, data)
    options = StartOptions(ModelOptions(cache_dir=tmp_path), ComputeOptions(buckets=(1, 4)))
    checkpoint = read_checkpoint(options)
    job = PlannedJob(checkpoint.folder, make_plan(checkpoint.config, options), packages)
    with Worker("snapcap.warmup.build.check_worker", job, {"AOTI_RUNTIME_CHECK_INPUTS": "1"}) as checker:
        assert checker.ask({"region": "decoder_before", "size": 1}, 120)["difference"] < 1e-4
        with pytest.raises(WorkerError, match="ended with signal 6"):
            checker.ask({"region": "decoder_block", "size": 1}, 120)
        assert checker.pid is None
        assert checker.ask({"region": "decoder_before", "size": 1}, 120)["difference"] < 1e-4  # by another process


class HungBuild:
    """`snapcap build` as a job of a terminal, whose compiler never ends. A context manager."""

    def __init__(self, built_cache: Path, folder: Path, *options: str) -> None:
        self.build = nearly_built(built_cache, folder / "cache" / "store", MISSING)
        self.compiler = HangingCompiler.make(folder / "compiler")
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._options = ("--cache-dir", str(folder / "cache"), "--buckets", "1,4", "--build-workers", "1", *options)

    def __enter__(self) -> "HungBuild":
        self.process = subprocess.Popen(
            [sys.executable, "-m", "snapcap", "build", *self._options],
            env=clean_environment(CXX=str(self.compiler.path), TMPDIR=str(self.temporary)),
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_until_it_hangs(self) -> list[int]:
        """Returns all that the build has started."""
        wait_until(lambda: self.compiler.hangs or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.process.communicate()[1]
        return descendants(self.process.pid)

    def end(self) -> tuple[int, str]:
        """Its exit status and what it has said."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.mark.parametrize(
    ("number", "whom", "status"), [(signal.SIGINT, "group", 130), (signal.SIGTERM, "parent", 143)]
)
def test_one_signal_ends_a_build_and_all_that_it_has_started(
    number: signal.Signals, whom: str, status: int, built_cache: Path, tmp_path: Path
) -> None:
    with HungBuild(built_cache, tmp_path, "--build-workers", "2") as hung:
        workers = hung.wait_until_it_hangs()
        assert len(workers) > 2
        (os.killpg if whom == "group" else os.kill)(hung.process.pid, number)
        ended, said = hung.end()
        assert ended == status
        assert said.splitlines()[-1] == (
            f"snapcap: interrupted; {PACKAGES - 2} of {PACKAGES} packages kept, run the command again to continue"
        )
        assert "Traceback" not in said
        assert "failed" not in said
        wait_until(lambda: hung.compiler.is_gone and all(map(is_gone, workers)), 30)
        assert list(hung.temporary.iterdir()) == []
        assert len([*hung.build.rglob("*.pt2")]) == PACKAGES - 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_ends_a_build_that_compiles_in_its_own_process(
    number: signal.Signals, status: int, built_cache: Path, tmp_path: Path
) -> None:
    """What its compiler's driver has started is nobody's child when the driver has been ended."""
    with HungBuild(built_cache, tmp_path, "--backend", "jit") as hung:
        hung.wait_until_it_hangs()
        hung.process.send_signal(number)
        ended, said = hung.end()
        assert (ended, said.splitlines()[-1]) == (status, "snapcap: interrupted; run the command again to continue")
        assert "Traceback" not in said
        wait_until(lambda: hung.compiler.is_gone, 30)


def test_a_second_signal_ends_a_build_at_once(built_cache: Path, tmp_path: Path) -> None:
    with HungBuild(built_cache, tmp_path) as hung:
        workers = hung.wait_until_it_hangs()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            with contextlib.suppress(ProcessLookupError):
                hung.process.send_signal(number)
        ended, said = hung.end()
        assert (ended in (130, 143), "Traceback" in said) == (True, False), said
        wait_until(lambda: hung.compiler.is_gone and all(map(is_gone, workers)), 30)


def test_a_build_that_is_killed_leaves_no_process(built_cache: Path, tmp_path: Path) -> None:
    with HungBuild(built_cache, tmp_path) as hung:
        workers = hung.wait_until_it_hangs()
        hung.process.kill()
        hung.process.wait()
        wait_until(lambda: hung.compiler.is_gone and all(map(is_gone, workers)), 30)


def test_a_signal_before_the_build_begins(built_cache: Path, tmp_path: Path) -> None:
    """While torch is imported, or whatever else comes first."""
    with HungBuild(built_cache, tmp_path) as hung:
        wait_until(lambda: b"snapcap" in Path(f"/proc/{hung.process.pid}/cmdline").read_bytes())
        time.sleep(1)
        os.killpg(hung.process.pid, signal.SIGINT)
        ended, said = hung.end()
        assert (ended, "Traceback" in said) == (130, False), said
        assert "snapcap: interrupted" in said


class HungServer:
    """A server whose background build has a compiler that never ends. A context manager."""

    def __init__(self, built_cache: Path, folder: Path, *options: str, missing: tuple[str, ...] = MISSING) -> None:
        self.store = folder / "store"
        nearly_built(built_cache, self.store, missing)
        self.compiler = HangingCompiler.make(folder / "compiler")
        cache = ("--cache-dir", str(folder), "--buckets", "1,4", "--drain-delay", "0")
        self.server = ServerProcess(*cache, *options, CXX=str(self.compiler.path))

    def __enter__(self) -> "HungServer":
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()

    def started(self) -> list[int]:
        """The server's processes and the build's."""
        return descendants(self.server.process.pid)

    def leases(self) -> list[Path]:
        return [*(self.store / "leases").glob("*")]


@pytest.mark.parametrize("moment", ["swap", "build"])
def test_a_server_that_is_ended_while_it_builds_leaves_no_process_and_no_lease(
    moment: str, built_cache: Path, tmp_path: Path
) -> None:
    with HungServer(built_cache, tmp_path) as hung:
        server = hung.server.wait_ready()
        # What was kept is swapped in as soon as the build begins.
        server.wait_for(lambda: " building " in server.log() if moment == "swap" else hung.compiler.hangs)
        started = hung.started()
        assert hung.leases()
        server.terminate()
        assert server.process.wait(30) == 0
        wait_until(lambda: all(map(is_gone, started)) and hung.compiler.is_gone, 30)
        assert hung.leases() == []
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("which", ["engine", "all"])
def test_a_server_that_is_killed_while_it_builds_leaves_no_process(
    which: str, built_cache: Path, tmp_path: Path
) -> None:
    with HungServer(built_cache, tmp_path) as hung:
        hung.server.wait_ready().wait_for(lambda: hung.compiler.hangs)
        started = hung.started()
        os.kill(hung.server.engine_pid if which == "engine" else hung.server.process.pid, signal.SIGKILL)
        hung.server.process.wait(60)
        wait_until(lambda: hung.compiler.is_gone and all(map(is_gone, started)), 30)


@dataclass
class Hung:
    """A build and a server whose compilers hang until a time limit ends them, and the processes of the build."""

    build: HungBuild
    server: HungServer
    workers: list[int]


@pytest.fixture(scope="module")
def hung_for_long(built_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hung]:
    limit = ("--build-timeout", str(LIMIT_S))
    folders = [tmp_path_factory.mktemp(name) for name in ("build", "server")]
    # One package: a server that has one compiler would wait that long for each.
    server = HungServer(built_cache, folders[1], *limit, missing=MISSING[:1])
    with HungBuild(built_cache, folders[0], "--build-workers", "2", *limit) as build, server:
        assert server.server.wait_ready().metrics()['snapcap_builds_total{result="failed"}'] == 0
        yield Hung(build, server, build.wait_until_it_hangs())


def test_a_compiler_that_hangs_is_ended_and_its_package_has_failed(hung_for_long: Hung) -> None:
    hung = hung_for_long.build
    _, said = hung.process.communicate(timeout=200)
    assert hung.process.returncode == 1, said
    words = " ".join(said.split())
    assert f"compile: snapcap.warmup.build.compile_worker took more than {LIMIT_S} s and was ended" in words
    assert f"2 of {PACKAGES} packages failed: nothing published" in words
    wait_until(lambda: hung.compiler.is_gone and all(map(is_gone, hung_for_long.workers)), 30)


def test_a_server_goes_on_when_its_build_hangs(hung_for_long: Hung, samples: dict[Path, str]) -> None:
    path, caption = next(iter(samples.items()))
    hung, server = hung_for_long.server, hung_for_long.server.server
    server.wait_for(lambda: (server.startup()["build"] or {}).get("state") == "failed", 200)
    assert f"took more than {LIMIT_S} s and was ended" in server.startup()["build"]["error"]
    assert "package failed" in server.log()
    assert server.metrics()['snapcap_builds_total{result="failed"}'] == 1
    wait_until(lambda: hung.compiler.is_gone and not hung.leases(), 30)
    assert server.caption(path)["caption"] == caption
