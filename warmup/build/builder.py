"""Builds every region at every bucket: compiled and checked by worker processes, in parallel and resumable.

    compilers ─▶ packages ─▶ checkers ─▶ kept beside their records ─▶ (all done) ─▶ manifest

A check is short beside a compilation, so a few checkers serve all compilers, which go on meanwhile.

The parent imports no torch. What is done lies in the build folder of its key: a second build of the same key does
nothing, and an interrupted one goes on where it was.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import Blob
from snapcap.warmup.build.environment import checker_environment, compiler_environment
from snapcap.warmup.build.folder import BuildFolder
from snapcap.warmup.build.worker import BuildJob
from snapcap.warmup.errors import BuildError, os_error_text
from snapcap.warmup.machine.cpus import available_cpus
from snapcap.warmup.machine.cxx import require_compiler
from snapcap.warmup.machine.scratch import scratch_folder
from snapcap.warmup.machine.worker import Worker, WorkerError, WorkerTimeoutError
from snapcap.warmup.options import BUILD_TIMEOUT
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import ComponentName
from snapcap.warmup.runtime.aoti.packages import InputSpecs
from snapcap.warmup.store.blobs import VerifiedFile

EventKind = Literal["kept", "compiled", "built", "failed"]

_COMPILER = "snapcap.warmup.build.compile_worker"
_CHECKER = "snapcap.warmup.build.check_worker"
_COMPILERS_A_CHECKER = 4
_LOOK_S = 0.5  # a signal that the system gives to another thread is seen by this one when it does not wait
_ENDING_S = 5.0  # for threads to find that their workers have been ended


@dataclass(frozen=True)
class Task:
    """One package to make. Without one that is called ``on_demand`` the set is used all the same."""

    entry: str
    region: str
    component: ComponentName
    size: int
    on_demand: bool = False


@dataclass(frozen=True)
class _Compiled:
    """A package that is to be checked."""

    task: Task
    seconds: float
    specs: InputSpecs


# What checkers take; None ends the one that takes it.
_Checks: TypeAlias = queue.SimpleQueue[_Compiled | None]


@dataclass(frozen=True)
class Event:
    """What happened to a package. ``kept``: it was there; ``built``: compiled and checked."""

    kind: EventKind
    task: Task
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Built:
    """What a build made: files and their input specs by entry name, and what failed and why; ``complete`` when
    everything is there that every start needs."""

    files: Mapping[str, VerifiedFile]
    input_specs: Mapping[str, InputSpecs]
    failures: Mapping[str, str]
    complete: bool


@dataclass
class _Progress:
    files: dict[str, VerifiedFile] = field(default_factory=dict)
    input_specs: dict[str, InputSpecs] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    moved: float = field(default_factory=time.monotonic)  # when something was made last, or failed by itself


def tasks_of(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """Every package of the set, smallest buckets first."""
    from snapcap.models.regions.table import build_regions  # noqa: PLC0415  imports torch, which a server has by now
    from snapcap.warmup.runtime.aoti.packages import entry_names  # noqa: PLC0415

    regions = build_regions(checkpoint.config)
    return [
        Task(entry, region.name, region.component, bucket.size, region.on_demand)
        for region, bucket, entry in entry_names(regions, plan.buckets)
    ]


class Builder:
    """One build of one key. ``run`` blocks; ``stop`` ends it from another thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        folder: Path,
        workers: int = 0,
        nice: int = 0,
        on_event: Callable[[Event], None] = lambda _event: None,
        environment: Mapping[str, str] | None = None,
        timeout: float = BUILD_TIMEOUT,
    ) -> None:
        """``folder``: where packages and their records are kept. ``workers``: compilers at once, 0 one a CPU.
        ``on_event`` is called from the workers' threads. ``environment``: more variables for the compilers.
        ``timeout``: seconds in which a worker must have answered; a build that makes nothing in twice that time is
        given up."""
        job = BuildJob(checkpoint.folder, plan, folder)
        self._worker = partial(Worker, job=job, nice=nice)
        self._timeout = timeout
        self._workers: list[Worker] = []
        self._tasks = tasks_of(checkpoint, plan)
        self._folder = BuildFolder(folder)
        self._compilers = min(workers or available_cpus(), len(self._tasks))
        self._on_event = on_event
        self._environment = dict(environment or {})
        self._device_type = plan.device_type
        self._stopped = threading.Event()
        self._progress = _Progress()

    @property
    def tasks(self) -> list[Task]:
        return list(self._tasks)

    def made(self) -> tuple[dict[str, VerifiedFile], dict[str, InputSpecs]]:
        """Files and specs of what is done so far, by entry name."""
        with self._progress.lock:
            return dict(self._progress.files), dict(self._progress.input_specs)

    def is_settled(self, component: ComponentName, size: int) -> bool:
        """Whether a bucket of a component has every package that it is going to have, and all that it needs."""
        with self._progress.lock:
            return all(
                task.entry in self._progress.files or (task.on_demand and task.entry in self._progress.failures)
                for task in self._tasks
                if (task.component, task.size) == (component, size)
            )

    def run(self) -> Built:
        """Make what is missing.

        Raises:
            BuildError: there is no compiler, or the folder cannot be written.
        """
        missing: queue.SimpleQueue[Task] = queue.SimpleQueue()
        count = 0
        for task in self._tasks:
            if (kept := self._folder.recorded(task.entry)) is not None:
                self._done(task, *kept)
                self._on_event(Event("kept", task))
            else:
                missing.put(task)
                count += 1
        if count:
            require_compiler()
            try:
                self._folder.make()
            except OSError as error:
                raise BuildError(f"cannot write to {self._folder.path}: {os_error_text(error)}") from error
            self._make(missing, count)
        files, specs = self.made()
        needed = {task.entry for task in self._tasks if not task.on_demand}
        return Built(files, specs, dict(self._progress.failures), complete=needed <= files.keys())

    def stop(self) -> None:
        """End the workers' processes; ``run`` returns with what is done."""
        self._stopped.set()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.stop()

    def _make(self, missing: "queue.SimpleQueue[Task]", packages: int) -> None:
        checks: _Checks = queue.SimpleQueue()
        checking: list[Future[None]] = []
        compiling: list[Future[None]] = []
        self._progress.moved = time.monotonic()
        with scratch_folder("snapcap-build-") as scratch:
            more = (scratch, self._device_type, packages, self._environment)
            count = min(self._compilers, packages)
            compilers = [self._worker(_COMPILER, environment=compiler_environment(*more)) for _ in range(count)]
            count = -(-count // _COMPILERS_A_CHECKER)
            checkers = [self._worker(_CHECKER, environment=checker_environment(scratch)) for _ in range(count)]
            self._workers = [*compilers, *checkers]  # all, before the first is asked, so that none escapes `stop`
            pool = ThreadPoolExecutor(len(self._workers), thread_name_prefix="build")
            try:
                checking += [pool.submit(self._check_all, checker, checks) for checker in checkers]
                compiling += [pool.submit(self._compile_all, each, missing, checks) for each in compilers]
                self._watch(compiling)
                for _ in checking:
                    checks.put(None)
                self._watch(checking)
            finally:
                self.stop()
                for _ in checking:
                    checks.put(None)
                # One that waits for something else than its worker, as for a disk that is gone, is left to itself.
                pool.shutdown(wait=False, cancel_futures=True)
                ended = wait([*compiling, *checking], _ENDING_S).done
        for thread in ended:
            thread.result()  # or one that broke would leave packages out that nobody misses

    def _watch(self, threads: "list[Future[None]]") -> None:
        """Wait for threads to end, as long as they make something."""
        while not self._stopped.is_set():
            left = self._progress.moved + 2 * self._timeout - time.monotonic()
            if left <= 0:
                self.stop()
                self._give_up(f"nothing was made in {2 * self._timeout:g} s, so the build was given up")
            elif not wait(threads, min(left, _LOOK_S)).not_done:
                return

    def _give_up(self, reason: str) -> None:
        """All that is not made has failed."""
        with self._progress.lock:
            for task in self._tasks:
                if task.entry not in self._progress.files:
                    self._progress.failures.setdefault(task.entry, reason)

    def _compile_all(self, compiler: Worker, missing: "queue.SimpleQueue[Task]", checks: _Checks) -> None:
        """Until nothing is left to compile."""
        with compiler:
            while not self._stopped.is_set():
                try:
                    task = missing.get_nowait()
                except queue.Empty:
                    return
                with self._failing(task, "compile"):
                    compiled = compiler.ask({"region": task.region, "size": task.size}, self._timeout)
                    self._tell(Event("compiled", task, compiled["seconds"]))
                    checks.put(_Compiled(task, compiled["seconds"], compiled["inputs"]))

    def _check_all(self, checker: Worker, checks: _Checks) -> None:
        """Until it is told that nothing more will come."""
        with checker:
            while (compiled := checks.get()) is not None and not self._stopped.is_set():
                task = compiled.task
                with self._failing(task, "self-check"):
                    checked = checker.ask({"region": task.region, "size": task.size}, self._timeout)
                    blob = Blob(checked["digest"], checked["size"])
                    with self._failing(task, "record"):
                        package = self._folder.record(task.entry, compiled.specs, blob)
                        self._done(task, package, compiled.specs)
                        self._tell(Event("built", task, compiled.seconds))

    @contextlib.contextmanager
    def _failing(self, task: Task, stage: str) -> Iterator[None]:
        """A package that cannot be made is noted with the stage; the others are made all the same."""
        try:
            yield
        except (WorkerError, OSError) as error:
            if self._stopped.is_set():
                return
            reason = f"{stage}: {error}"
            with self._progress.lock:
                self._progress.failures[task.entry] = reason
            self._tell(Event("failed", task, error=reason), moved=not isinstance(error, WorkerTimeoutError))

    def _tell(self, event: Event, moved: bool = True) -> None:
        if moved:
            self._progress.moved = time.monotonic()
        self._on_event(event)

    def _done(self, task: Task, package: VerifiedFile, specs: InputSpecs) -> None:
        with self._progress.lock:
            self._progress.files[task.entry] = package
            self._progress.input_specs[task.entry] = specs
