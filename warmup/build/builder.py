"""Builds every region at every bucket: compiled and checked by worker processes, in parallel and resumable.

    compilers ─▶ packages ────┐
    compiler ─▶ CPU library ──┴▶ checkers ─▶ packages with records ─▶ (all done) ─▶ manifest

A check takes less time than a compilation, so a few checkers serve all compilers. The CPU library
(`runtime.aoti.cpu_library`) is in the set if every package runs on it. The image library is compiled too.

A compilation or check on a GPU begins when its memory is free (`Room`). A package that still runs out of memory is
compiled again after all workers have ended, while nothing else runs.

The parent imports no torch. Finished packages are kept in the build folder of their artifact key, so a second build
of the same key compiles nothing, and an interrupted build resumes.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.folder import WRITTEN_BY_OTHERS, close_to_others
from snapcap.warmup.artifacts.manifest import CPU_LIBRARY, IMAGE_LIBRARY, Blob, VerifiedFile
from snapcap.warmup.build.environment import compiler_environment
from snapcap.warmup.errors import BuildError, os_error_text
from snapcap.warmup.machine.capacity import available_cpus, free_memory
from snapcap.warmup.machine.files import locked_alone, make_folder, open_regular, scratch_folder, write_file
from snapcap.warmup.machine.installation import find_compiler, require_compiler
from snapcap.warmup.machine.worker import Worker, WorkerError, WorkerTimeoutError
from snapcap.warmup.options import BUILD_TIMEOUT
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.memory import PROCESS_BYTES, MemoryPlan, checkpoint_bytes, gib
from snapcap.warmup.plan.plan import Plan, PlannedJob
from snapcap.warmup.progress.status import ComponentName
from snapcap.warmup.runtime.aoti.packages import InputSpecs, entry_names

_logger = logging.getLogger("snapcap.build")
T = TypeVar("T")


class Room:
    """Reserves bytes of device memory for compilations and checks. Thread-safe.

    Work that needs more than the whole memory runs alone: the need is an estimate, and may be too high."""

    def __init__(self, size: int | None) -> None:
        """``size``: bytes of the whole memory; None: no limit."""
        self._size = size
        self._used = 0
        self._running = 0
        self.changed = threading.Condition()

    def try_to_enter(self, need: int) -> bool:
        """Reserve ``need`` bytes and return True, if they are free. The caller holds the condition."""
        if self._size is not None and self._running > 0 and self._used + need > self._size:
            return False
        self._used += need
        self._running += 1
        return True

    def leave(self, need: int) -> None:
        """Release ``need`` reserved bytes."""
        with self.changed:
            self._used -= need
            self._running -= 1
            self.changed.notify_all()


class WorkQueue(Generic[T]):
    """Queues work that waits for device memory. The first entry that fits is taken, so small ones fill gaps."""

    def __init__(self, room: Room, need: Callable[[T], int]) -> None:
        self._room = room
        self._need = need
        self._waiting: list[T] = []
        self._closed = False

    def put(self, piece: T) -> None:
        with self._room.changed:
            self._waiting.append(piece)
            self._room.changed.notify_all()

    def close(self) -> None:
        """Accept no further entries: ``taken`` yields None once the queue is empty."""
        with self._room.changed:
            self._closed = True
            self._room.changed.notify_all()

    def abandon(self) -> None:
        """Drop all entries, and make each waiting ``taken`` yield None."""
        with self._room.changed:
            self._waiting.clear()
        self.close()

    @contextmanager
    def taken(self) -> Iterator[T | None]:
        """Wait for an entry that fits, and reserve its memory inside the block. Yields None if no entry is left."""
        piece = self._wait()
        try:
            yield piece
        finally:
            if piece is not None:
                self._room.leave(self._need(piece))

    def _wait(self) -> T | None:
        with self._room.changed:
            while True:
                for place, piece in enumerate(self._waiting):
                    if self._room.try_to_enter(self._need(piece)):
                        return self._waiting.pop(place)
                if self._closed and not self._waiting:
                    return None
                self._room.changed.wait()


@dataclass(frozen=True)
class Task:
    """Describes a package to build.

    on_demand: the artifact set is complete without this package.
    need: bytes of device memory that compiling or checking the package takes at most, besides its process."""

    entry: str
    region: str
    component: ComponentName
    size: int
    on_demand: bool = False
    need: int = 0


@dataclass(frozen=True)
class Event:
    """Reports the progress of a package. ``kept``: an earlier run built it; ``built``: compiled and checked."""

    kind: Literal["kept", "compiled", "built", "failed"]
    task: Task
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Built:
    """Holds the results of a build.

    files, input_specs: packages and their input specs, by entry name.
    failures: the reason of each failed package, by entry name.
    libraries: the CPU library, if all packages run on it, and the image library, by entry name.
    no_libraries: why a library that the plan allows is not there, by entry name.
    complete: every package that every start needs is built."""

    files: dict[str, VerifiedFile] = field(default_factory=dict)
    input_specs: dict[str, InputSpecs] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, VerifiedFile] = field(default_factory=dict)
    no_libraries: dict[str, str] = field(default_factory=dict)
    complete: bool = False


def tasks_of(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """Returns a task for every package of the set, smallest buckets first."""
    weights, memory = checkpoint_bytes(checkpoint.folder, plan.dtype), MemoryPlan(checkpoint.config, plan)
    return [
        Task(
            entry,
            region.name,
            region.component,
            bucket.size,
            region.on_demand,
            memory.package(region, bucket.size, weights),
        )
        for region, bucket, entry in entry_names(memory.regions, plan)
    ]


_RECORD_BYTES = 1024 * 1024


@dataclass(frozen=True)
class BuildFolder:
    """Keeps the packages and records of one artifact key's build, so that an interrupted build resumes.

    ``only_own``: packages that a group could have written do not count, as a member could have put them there. Such
    a group is that of a volume in Kubernetes (fsGroup), where a start that needs signatures trusts its owner
    alone."""

    path: Path
    only_own: bool = False

    def close(self) -> None:
        """Keeps others from writing to the folder from now on, if ``only_own`` is set. Raises BuildError if the
        folder belongs to another user, and OSError if it cannot be made."""
        for folder in (self.path, (self.path / IMAGE_LIBRARY).parent) if self.only_own else ():
            make_folder(folder)
            if folder.is_symlink() or folder.lstat().st_uid not in (os.geteuid(), 0):
                raise BuildError(f"{folder} belongs to another user, who could change what is built: remove it")
            close_to_others(folder, folder.lstat())

    def record(self, entry: str, specs: InputSpecs, checked: Blob, library: str = "") -> VerifiedFile:
        """Record that a package passed its check, with the digest and size that it had then. A package without a
        record counts as not built. ``library``: the digest of the CPU library on which the package passed too; ""
        for none. Raises OSError if the record cannot be written."""
        path = self.path / entry
        record = {"digest": checked.digest, "size": checked.size, "signature": specs, "library": library}
        close_to_others(path, path.lstat())  # torch writes it with the permissions of the umask
        write_file(path.with_suffix(".json"), json.dumps(record).encode(), durable=False)
        return VerifiedFile(path, checked)

    def recorded(self, entry: str) -> tuple[VerifiedFile, InputSpecs, str] | None:
        """Returns an earlier run's record of a package: the file, its input specs and the digest of the CPU
        library. Returns None if there is no valid record, if the file has changed since its check, or if another
        user could have written one of the two and ``only_own`` is set."""
        path = self.path / entry
        try:
            if self.only_own and not (_is_own(path) and _is_own(path.with_suffix(".json"))):
                return None
            with open_regular(path.with_suffix(".json")) as file:
                record: dict[str, Any] = json.loads(file.read(_RECORD_BYTES))
            package = VerifiedFile.of(path)
            if package.blob != Blob(record["digest"], record["size"]):
                return None
            return package, record["signature"], str(record["library"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def _is_own(path: Path) -> bool:
    """Returns whether only this user, or root, can have written a file. Raises OSError if it is missing."""
    status = path.lstat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & WRITTEN_BY_OTHERS


_COMPILER = "snapcap.warmup.build.compile_worker"
_CHECKER = "snapcap.warmup.build.check_worker"
_LIBRARY_COMPILER = "snapcap.warmup.build.library_worker"
_COMPILERS_A_CHECKER = 4
_HOST_BYTES = 3 << 29  # host memory of a worker and the compiler that it calls
# Texts by which torch, the driver, cuBLAS and Linux's OOM killer report a lack of memory.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "ended with signal 9")
_TURN = ".lock"  # the file in a build's folder that is locked by the process that builds there
_LOOK_S = 0.5  # the main thread wakes this often, because Python runs signal handlers only there
_ENDING_S = 5.0  # seconds for threads to notice that their workers have been ended


@dataclass(frozen=True)
class _Compiled:
    """Holds a package to check. ``kept``: checked by an earlier run, but not on the CPU library."""

    task: Task
    seconds: float
    specs: InputSpecs
    kept: VerifiedFile | None = None


_Checks: TypeAlias = WorkQueue[_Compiled]


@dataclass(eq=False)
class Builder:
    """Builds the artifact set of a key. ``run`` blocks; ``stop`` ends the build from another thread.

    ``folder``: keeps packages and their records. ``workers``: most compilers at once; 0: one for each CPU.
    ``on_event`` is called from the workers' threads. ``environment``: further variables for the compilers.
    ``timeout``: seconds in which a worker must answer; a build without progress in twice this time is given up.
    ``device_memory``: bytes of the GPU that the build may take; None: no limit. ``only_own``: as in
    ``BuildFolder``."""

    checkpoint: Checkpoint
    plan: Plan
    folder: Path
    workers: int = 0
    nice: int = 0
    on_event: Callable[[Event], None] = lambda _event: None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float = BUILD_TIMEOUT
    device_memory: int | None = None
    only_own: bool = False

    def __post_init__(self) -> None:
        checkpoint, plan = self.checkpoint, self.plan
        self.tasks = tasks_of(checkpoint, plan)
        self._worker = partial(Worker, job=PlannedJob(checkpoint.folder, plan, self.folder), nice=self.nice)
        self._running: list[Worker] = []
        self._records = BuildFolder(self.folder, self.only_own)
        self._weights = checkpoint_bytes(checkpoint.folder, plan.dtype)
        self._retries: list[Task] = []
        self._alone = False
        self._libraries = (CPU_LIBRARY, IMAGE_LIBRARY) if plan.may_be_standalone else (IMAGE_LIBRARY,)
        self._stopped = threading.Event()
        self._built = Built()  # so far
        self._passed_on: dict[str, str] = {}  # by entry, the digest of the CPU library that the package runs on
        self._lock = threading.Lock()
        self._moved = time.monotonic()  # when the last package was built or failed

    def made(self) -> tuple[dict[str, VerifiedFile], dict[str, InputSpecs]]:
        """Returns the files and input specs of all finished packages, by entry name."""
        with self._lock:
            return dict(self._built.files), dict(self._built.input_specs)

    def is_settled(self, component: ComponentName, size: int) -> bool:
        """Returns whether no package of a component's bucket is left to build: each package is built, or is called
        on demand and failed."""
        with self._lock:
            return all(
                task.entry in self._built.files or (task.on_demand and task.entry in self._built.failures)
                for task in self.tasks
                if (task.component, task.size) == (component, size)
            )

    def run(self) -> Built:
        """Build the missing packages, once no other process builds in this folder. Raises BuildError without a
        compiler or a writable folder."""
        with self._turn():
            return self._built if self._stopped.is_set() else self._run()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits until no other process builds in the folder, and keeps others from it inside the block. Two builds
        would replace each other's packages after their checks, and neither could publish its set. Without locks or
        a writable folder, nobody is waited for."""
        path, waits = self.folder / _TURN, False
        with contextlib.ExitStack() as scope:
            while not self._stopped.is_set():
                with contextlib.ExitStack() as entering:
                    alone: bool | None = None
                    with contextlib.suppress(OSError):
                        make_folder(self.folder)
                        alone = entering.enter_context(locked_alone(path))
                    if alone is not False:
                        scope.push(entering.pop_all())
                        break
                if not waits:
                    _logger.info(
                        "waiting for the process that builds these packages",
                        extra={"fields": {"folder": str(self.folder)}},
                    )
                waits = True
                self._stopped.wait(_LOOK_S)
            yield

    def _run(self) -> Built:
        missing, kept = list[Task](), list[_Compiled]()
        with contextlib.suppress(OSError):  # a folder that nobody can write to may have all packages
            self._records.close()
        for task in self.tasks:
            if (found := self._records.recorded(task.entry)) is not None:
                self._done(task, *found)
                kept.append(_Compiled(task, 0.0, found[1], found[0]))
                self.on_event(Event("kept", task))
            else:
                missing.append(task)
        if missing:
            require_compiler()
        libraries = self._built.libraries
        for entry in self._libraries:
            if (found := self._records.recorded(entry)) is not None:
                libraries[entry] = found[0]
        standalone = CPU_LIBRARY in self._libraries
        unchecked = [each for each in kept if standalone and not self._runs_on_library(each.task.entry)]
        if missing or ((unchecked or IMAGE_LIBRARY not in libraries) and find_compiler() is not None):
            try:
                make_folder(self._records.path)
            except OSError as error:
                raise BuildError(f"cannot write to {self._records.path}: {os_error_text(error)}") from error
            self._make(missing, unchecked, *self._workers_that_fit(missing))
            self._alone = True
            while self._retries and not self._stopped.is_set():
                self._make([self._retries.pop(0)], [], 1, 1)
        files, specs = self.made()
        whole = CPU_LIBRARY in libraries and all(map(self._runs_on_library, files))
        (self._built.no_libraries if whole else libraries).pop(CPU_LIBRARY, None)
        return Built(
            files,
            specs,
            dict(self._built.failures),
            dict(libraries),
            dict(self._built.no_libraries),
            complete={task.entry for task in self.tasks if not task.on_demand} <= files.keys(),
        )

    def _runs_on_library(self, entry: str) -> bool:
        """Returns whether a package passed its check on the CPU library of this build."""
        library = self._built.libraries.get(CPU_LIBRARY)
        return library is not None and self._passed_on.get(entry) == library.blob.digest

    def stop(self) -> None:
        """End the workers' processes; ``run`` then returns the finished packages."""
        self._stopped.set()
        self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._running:
            worker.kill()
        for worker in self._running:
            worker.stop()

    def _workers_that_fit(self, missing: Sequence[Task]) -> tuple[int, int]:
        """Returns the number of compilers and of checkers: one for each CPU, as far as they fit into host memory,
        and into the GPU's memory beside the task that needs the most."""
        largest = max((task.need for task in missing), default=0)
        for compilers in range(min(self.workers or available_cpus(), len(missing)), 1, -1):
            checkers = -(-compilers // _COMPILERS_A_CHECKER)
            processes = compilers + checkers
            on_host = processes * _HOST_BYTES + checkers * self._weights
            on_device = processes * PROCESS_BYTES + largest
            if on_host <= free_memory() and (self.device_memory is None or on_device <= self.device_memory):
                return compilers, checkers
        return 1, 1

    def _make(self, missing: Sequence[Task], unchecked: Sequence[_Compiled], compilers: int, checkers: int) -> None:
        memory = self.device_memory
        room = Room(None if memory is None else max(0, memory - (compilers + checkers) * PROCESS_BYTES))
        checks: _Checks = WorkQueue(room, lambda compiled: compiled.task.need)
        packages: WorkQueue[Task] = WorkQueue(room, lambda task: task.need)
        for each in unchecked:
            checks.put(each)
        for task in missing:
            packages.put(task)
        packages.close()
        checking: list[Future[None]] = []
        compiling: list[Future[None]] = []
        self._moved = time.monotonic()
        with scratch_folder("snapcap-build-") as scratch:
            more = (scratch, self.plan.device_type, len(missing), self.environment, compilers)
            compile_workers = [
                self._worker(_COMPILER, environment=compiler_environment(*more)) for _ in range(compilers)
            ]
            checked = {"AOTI_RUNTIME_CHECK_INPUTS": "1", "TMPDIR": str(scratch)}
            check_workers = [self._worker(_CHECKER, environment=checked) for _ in range(checkers)]
            library_worker = self._worker(_LIBRARY_COMPILER, environment={"TMPDIR": str(scratch)})
            # Every worker is listed before the first task is sent, so that none escapes `stop`.
            self._running = [*compile_workers, *check_workers, library_worker]
            pool = ThreadPoolExecutor(len(self._running), thread_name_prefix="build")
            try:
                library = pool.submit(self._compile_libraries, library_worker)
                checking += [pool.submit(self._check_all, each, checks, library) for each in check_workers]
                compiling += [pool.submit(self._compile_all, each, packages, checks) for each in compile_workers]
                self._watch([*compiling, library])
                checks.close()
                self._watch(checking)
            finally:
                self._end_workers()
                packages.abandon()
                checks.abandon()
                # A thread that hangs on anything but its worker, such as a lost disk, is abandoned after the wait.
                pool.shutdown(wait=False, cancel_futures=True)
                ended = wait([*compiling, *checking, library], _ENDING_S).done
        for thread in ended:
            thread.result()  # otherwise a broken build could publish an incomplete set unnoticed

    def _watch(self, threads: "list[Future[None]]") -> None:
        """Wait until the threads end, or give the build up if they make no progress."""
        while not self._stopped.is_set():
            left = self._moved + 2 * self.timeout - time.monotonic()
            if left <= 0:
                self.stop()
                reason = f"nothing was made in {2 * self.timeout:g} s, so the build was given up"
                with self._lock:
                    missing = [task.entry for task in self.tasks if task.entry not in self._built.files]
                    self._built.failures.update(dict.fromkeys(missing, reason) | self._built.failures)
            elif not wait(threads, min(left, _LOOK_S)).not_done:
                return

    def _compile_all(self, compiler: Worker, packages: WorkQueue[Task], checks: _Checks) -> None:
        """Compile packages with one worker until the queue is empty."""
        with compiler:
            while not self._stopped.is_set():
                with packages.taken() as task:
                    if task is None:
                        return
                    with self._failing(task, "compile"):
                        compiled = compiler.ask({"region": task.region, "size": task.size}, self.timeout)
                        self._tell(Event("compiled", task, compiled["seconds"]))
                        checks.put(_Compiled(task, compiled["seconds"], compiled["inputs"]))

    def _compile_libraries(self, compiler: Worker) -> None:
        """Compile the CPU library, if the plan wants it, and the image library, unless an earlier run has built
        them. A failure is recorded and not raised: packages also run on libtorch, and Pillow also resizes."""
        built = self._built
        with compiler:
            for entry in [each for each in self._libraries if each not in built.libraries]:
                try:
                    blob = Blob(**compiler.ask({"entry": entry}, self.timeout))
                    built.libraries[entry] = self._records.record(entry, [], blob)
                except (WorkerError, OSError) as error:
                    built.no_libraries[entry] = f"it cannot be compiled: {error}"

    def _check_all(self, checker: Worker, checks: _Checks, library: "Future[None]") -> None:
        """Check packages with one worker until the queue is closed and empty."""
        with checker:
            while not self._stopped.is_set():
                with checks.taken() as compiled:
                    if compiled is None:
                        return
                    with self._failing(compiled.task, "self-check"):
                        self._check(compiled, checker, library)

    def _check(self, compiled: _Compiled, checker: Worker, library: "Future[None]") -> None:
        task, asked = compiled.task, {"region": compiled.task.region, "size": compiled.task.size}
        if compiled.kept is not None:
            blob = compiled.kept.blob
        elif self.plan.runs_on_libtorch:
            checked = checker.ask(asked, self.timeout)
            blob = Blob(checked["digest"], checked["size"])
        else:
            blob = VerifiedFile.of(self._records.path / task.entry).blob
        library.result()
        passed_on = self._checked_on_library(task, asked, checker)
        if not (passed_on or self.plan.runs_on_libtorch):
            raise WorkerError(f"int8 needs the CPU library: {self._built.no_libraries[CPU_LIBRARY]}")
        with self._failing(task, "record"):
            package = self._records.record(task.entry, compiled.specs, blob, passed_on)
            self._done(task, package, compiled.specs, passed_on)
            if compiled.kept is None:
                self._tell(Event("built", task, compiled.seconds))

    def _checked_on_library(self, task: Task, asked: dict[str, Any], checker: Worker) -> str:
        """Returns the digest of the CPU library if a package runs on it, else "". A package that does not run on
        the CPU library still runs on libtorch."""
        library = self._built.libraries.get(CPU_LIBRARY)
        if library is None:
            return ""
        try:
            checker.ask({**asked, "on": "library"}, self.timeout)
        except WorkerError as error:
            if self._stopped.is_set():
                raise  # `stop` ended the check; the package is not at fault
            self._built.no_libraries[CPU_LIBRARY] = f"{task.entry} does not run on it: {error}"
            return ""
        return library.blob.digest

    @contextlib.contextmanager
    def _failing(self, task: Task, stage: str) -> Iterator[None]:
        """Records an error of a package with its stage; the build of other packages continues."""
        try:
            yield
        except (WorkerError, OSError) as error:
            if self._stopped.is_set():
                return
            reason = f"{stage}: {error}"
            if any(words in reason for words in _OUT_OF_MEMORY):
                if not self._alone:
                    with self._lock:
                        self._retries.append(task)
                    return
                reason = f"{reason}; {self._lacking(task)}"
            with self._lock:
                self._built.failures[task.entry] = reason
            self._tell(Event("failed", task, error=reason), moved=not isinstance(error, WorkerTimeoutError))

    def _lacking(self, task: Task) -> str:
        """Returns advice for a package that does not fit into device memory, even alone."""
        fitting = [str(size) for size in self.plan.buckets if size < task.size]
        advice = f"build and serve with --buckets {','.join(fitting)}" if fitting else "a larger GPU is needed"
        if self.plan.step_buckets:  # their slots make the inputs of every package larger
            advice = "build and serve with --step-buckets none"
        free = "" if self.device_memory is None else f", and {gib(self.device_memory)} were free"
        return f"it ran alone and needs up to {gib(task.need + PROCESS_BYTES)}{free}: {advice}"

    def _tell(self, event: Event, moved: bool = True) -> None:
        if moved:
            self._moved = time.monotonic()
        self.on_event(event)

    def _done(self, task: Task, package: VerifiedFile, specs: InputSpecs, passed_on: str) -> None:
        with self._lock:
            self._built.files[task.entry] = package
            self._passed_on[task.entry] = passed_on
            self._built.input_specs[task.entry] = specs
