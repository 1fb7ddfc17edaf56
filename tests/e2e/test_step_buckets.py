"""A bucket of decode steps alone: READY does not wait for it, its packages are opened beside the device thread, and
then it serves."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.demo_engine import PATIENCE, Demo, opened
from support.servers.server_process import snapcap, wait_until

from snapcap.service import readiness
from snapcap.warmup.artifacts.manifest import LIBRARIES, VerifiedFile
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.runtime.aoti.packages import AotiError, Container, region_of
from snapcap.warmup.runtime.torch_model import LoadedModel
from snapcap.warmup.start.background_build import BackgroundBuild

SIZES, STEPS = (1, 4), (8,)


class Begun(threading.Thread):
    """A timer that a test starts."""

    def cancel(self) -> None:
        """Has no time to wait for."""

    def join(self, timeout: float | None = None) -> None:
        if self.ident is not None:
            super().join(timeout)


class Opened:
    """Notes the thread that opens each package of a step bucket. A test begins the work that follows READY."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.broken = False
        self.works: list[Callable[[], object]] = []
        self._digests: set[str] = set()
        self._open = Container.open
        monkeypatch.setattr(Container, "open", self._opened)
        monkeypatch.setattr(readiness, "after_ready", self._after_ready)

    def _after_ready(self, work: Callable[[], object]) -> threading.Thread:
        self.works.append(work)
        self._thread = Begun(target=work, name="after-ready", daemon=True)
        return self._thread

    def watch(self, demo: Demo) -> None:
        assert demo.loaded.artifacts is not None
        for entry, package in demo.loaded.artifacts.fetched.entries.items():
            if entry not in LIBRARIES and region_of(entry)[1] in STEPS:
                self._digests.add(package.blob.digest)

    def _opened(self, package: VerifiedFile, *where: Any) -> Container:
        self.threads.append(f"{package.blob.digest} {threading.current_thread().name}")
        if self.broken and package.blob.digest in self._digests:
            raise AotiError("it is of another system")
        return self._open(package, *where)

    @property
    def of_steps(self) -> list[str]:
        """The thread that opened each package of a step bucket."""
        found = [each.split(" ", 1) for each in self.threads]
        return [thread for digest, thread in found if digest in self._digests]

    def go_on(self) -> None:
        assert len(self.works) == 1
        self._thread.start()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(monkeypatch)


@pytest.fixture(params=[True, False], ids=["native", "with torch"])
def demo(request: pytest.FixtureRequest, stepped_cache: Path, packages: Opened) -> Iterator[Demo]:
    """A server that is ready, and has not begun what follows."""
    compute = ComputeOptions("cpu", backend="aot", buckets=SIZES, step_buckets=STEPS, strict=True)
    model = ModelOptions(cache_dir=stepped_cache, prepared_weights=request.param)
    with opened(StartOptions(model, compute)) as found:
        assert isinstance(found.loaded.model, LoadedModel) is not request.param
        packages.watch(found)
        yield found


def state(demo: Demo) -> tuple[str, str]:
    (bucket,) = (bucket for bucket in demo.status.buckets() if bucket.size in STEPS)
    assert bucket.component == "decoder"
    return bucket.state, bucket.backend


def crowd(demo: Demo, samples: dict[Path, str], beams: int = 2) -> int:
    """Captions twelve pictures that come together as each of them alone; returns the most rows of a step. An encode
    has at most four images, so that rows which end soon run together only as beams, where encodes are beside steps.
    """
    paths = ([*samples] * 3)[:12]
    alone = {path: demo.run(demo.request(path, num_beams=beams)).tokens for path in samples}
    assert beams > 1 or {path: demo.tokenizer.decode(tokens) for path, tokens in alone.items()} == samples
    demo.observer.steps.clear()
    found = demo.together(*(demo.request(path, num_beams=beams) for path in paths))
    assert [each.tokens for each in found] == [alone[path] for path in paths]
    assert {each.backend for each in found} == {"aot"}
    assert {bucket for bucket, _ in demo.observer.encodes} <= {*SIZES}
    assert all(bucket == demo.loaded.plan.step_table.fit(rows).size for bucket, rows in demo.observer.steps)
    return max(rows for _, rows in demo.observer.steps)


def test_it_is_made_ready_after_ready_and_serves(demo: Demo, packages: Opened, samples: dict[Path, str]) -> None:
    plan = demo.loaded.plan
    assert (plan.slots, plan.table.sizes, plan.step_table.sizes) == (8, SIZES, (1, 4, 8))
    assert demo.loaded.warm_table.sizes == SIZES
    assert (state(demo), packages.of_steps) == (("pending", "aot"), [])
    assert crowd(demo, samples) == 4
    packages.go_on()
    wait_until(lambda: state(demo) == ("warm", "aot"))
    rows = crowd(demo, samples, beams=1)
    assert rows == 8 or demo.loaded.runner.encodes_beside
    assert packages.of_steps == ["after-ready"] * 3, "the three of every step, by no other thread, and none twice"
    assert crowd(demo, samples) == crowd(demo, samples, beams=8) == 8


def test_rows_that_run_meanwhile_keep_their_captions(
    demo: Demo, packages: Opened, samples: dict[Path, str]
) -> None:
    step, begun = demo.loaded.runner.decode_step, threading.Event()

    def decode_step(*arguments: Any) -> Any:
        if not begun.is_set():
            begun.set()
            packages.go_on()
        return step(*arguments)

    demo.loaded.runner.decode_step = decode_step  # type: ignore[method-assign]
    while state(demo)[0] == "pending":
        crowd(demo, samples)
    assert state(demo) == ("warm", "aot")


def test_one_that_cannot_be_opened_is_given_up_and_no_request_notices(
    demo: Demo, packages: Opened, samples: dict[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    packages.broken = True
    packages.go_on()
    wait_until(lambda: state(demo) == ("failed", "aot"))
    assert crowd(demo, samples) == 4
    assert {*packages.of_steps} == {"after-ready"}
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "bucket cannot be made ready"
    ]


def test_a_background_build_swaps_it_in(
    stepped_cache: Path, tmp_path: Path, packages: Opened, samples: dict[Path, str]
) -> None:
    """Before the eager start has made it ready, too."""
    compute = ComputeOptions("cpu", buckets=SIZES, step_buckets=STEPS)
    options = StartOptions(ModelOptions(cache_dir=tmp_path, prepared_weights=False), compute)
    with opened(options) as demo:
        assert state(demo) == ("pending", "eager")
        shutil.copytree(stepped_cache / "store", tmp_path / "store", dirs_exist_ok=True)
        build = BackgroundBuild(demo.loaded, options, demo.status, demo.engine.call)
        build.start()
        wait_until(lambda: (demo.status.state.build or {}).get("state") == "fetched")
        build.stop()
        assert demo.status.counts("bucket_swaps") == {("swapped",): 5}
        assert state(demo) == ("warm", "aot")
        assert crowd(demo, samples) == 4
        packages.go_on()
        wait_until(lambda: crowd(demo, samples) == 8)


def test_a_build_names_them(stepped_cache: Path) -> None:
    options = ("--buckets", "1,4", "--step-buckets", "8", "--cache-dir", str(stepped_cache))
    run = snapcap("build", *options, timeout=PATIENCE)
    assert (run.returncode, "buckets 1,4, step buckets 8" in run.stderr) == (0, True), run.stderr
    assert snapcap("explain", *options).returncode == 0
    assert "model.step_buckets" in snapcap("explain", *options[:2], *options[4:]).stdout
