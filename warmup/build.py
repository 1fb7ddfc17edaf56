"""The build: every region at every bucket, compiled and checked by child processes, in parallel and resumable.

    compiler children ─▶ packages ─▶ checker children ─▶ kept beside their records ─▶ (all done) ─▶ manifest

A check is short beside a compilation, so a few checkers serve all compilers, which go on meanwhile.

The parent imports no torch. What is done lies in the build folder of its key: a second build of the same key does
nothing, and an interrupted one goes on where it was.
"""

import contextlib
import json
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from warmup.build_children import Children, ReplaceableChild
from warmup.child import ChildError
from warmup.cpus import available_cpus
from warmup.cxx import compiler_names, find_compiler
from warmup.files import describe
from warmup.packages import Signature
from warmup.plan import Plan
from warmup.prepared import Checkpoint
from warmup.region_task import job_of
from warmup.status import ComponentName

EventKind = Literal["kept", "compiled", "built", "failed"]

# What a compiler child runs with. No pool of helpers: the children are the pool, one thread each beside the
# compiler it calls. No line tables: they are four fifths of a package. And no test compilations of vector
# instructions that the CPU says it has: 15 to 50 s before a child's first package (benchmarks/NOTES.md).
_COMPILER = {
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_WARM_POOL": "0",
    "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0",
}
_CHECKER = {"AOTI_RUNTIME_CHECK_INPUTS": "1"}
_COMPILERS_A_CHECKER = 4


class BuildError(RuntimeError):
    """A build that cannot begin; one line that says what to do."""


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
    signature: Signature


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
    """What a build made: files and their input signatures by entry name, and what failed and why; ``complete`` when
    nothing that every start needs has failed."""

    files: Mapping[str, Path]
    signatures: Mapping[str, Signature]
    failures: Mapping[str, str]
    complete: bool


@dataclass
class _Progress:
    files: dict[str, Path] = field(default_factory=dict)
    signatures: dict[str, Signature] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def require_compiler() -> str:
    """The C++ compiler that Inductor will call.

    Raises:
        BuildError: there is none.
    """
    if (name := find_compiler()) is not None:
        return name
    looked_for = " or ".join(compiler_names())
    raise BuildError(
        f"no C++ compiler ({looked_for}) on this machine; install one (apt-get install g++), or run "
        "`snapcap build` on a machine of the same kind that has one"
    )


def tasks_of(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """Every package of the set, smallest buckets first."""
    from models.regions import build_regions  # noqa: PLC0415  imports torch, which a server has by now
    from warmup.packages import entry_names  # noqa: PLC0415

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
    ) -> None:
        """``folder``: where packages and their records are kept. ``workers``: compilers at once, 0 one a CPU.
        ``on_event`` is called from the workers' threads. ``environment``: more variables for the compilers."""
        self._children = Children(job_of(checkpoint.folder, plan, folder), nice)
        self._tasks = tasks_of(checkpoint, plan)
        self._folder = folder
        self._workers = min(workers or available_cpus(), len(self._tasks))
        self._on_event = on_event
        self._environment = {**_COMPILER, **(environment or {})}
        # Two that embed the same kernel at once would write the same object file in Inductor's cache folder.
        self._own_caches = plan.device_type == "cuda"
        self._stopped = threading.Event()
        self._progress = _Progress()

    @property
    def tasks(self) -> list[Task]:
        return list(self._tasks)

    def made(self) -> tuple[dict[str, Path], dict[str, Signature]]:
        """Files and signatures of what is done so far, by entry name."""
        with self._progress.lock:
            return dict(self._progress.files), dict(self._progress.signatures)

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
            if self._keep(task):
                self._on_event(Event("kept", task))
            else:
                missing.put(task)
                count += 1
        if count:
            require_compiler()
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise BuildError(f"cannot write to {self._folder}: {error.strerror}") from error
            self._make(missing, min(self._workers, count))
        failures = dict(self._progress.failures)
        needed = {task.entry for task in self._tasks if not task.on_demand}
        return Built(*self.made(), failures, complete=not needed & failures.keys())

    def stop(self) -> None:
        """End the children; ``run`` returns with what is done."""
        self._stopped.set()
        self._children.kill()

    def _make(self, missing: "queue.SimpleQueue[Task]", compilers: int) -> None:
        checkers = -(-compilers // _COMPILERS_A_CHECKER)
        checks: _Checks = queue.SimpleQueue()
        with ThreadPoolExecutor(compilers + checkers, thread_name_prefix="build") as pool:
            checking = [pool.submit(self._check_all, checks) for _ in range(checkers)]
            try:
                compiling = [pool.submit(self._compile_all, missing, checks) for _ in range(compilers)]
                wait(compiling)
            finally:
                for _ in checking:
                    checks.put(None)
        for worker in (*compiling, *checking):
            worker.result()  # or a worker that broke would leave packages out that nobody misses

    def _compile_all(self, missing: "queue.SimpleQueue[Task]", checks: _Checks) -> None:
        """One compiler child, replaced when it dies, until nothing is left to compile."""
        with self._compiler() as compiler:
            while not self._stopped.is_set():
                try:
                    task = missing.get_nowait()
                except queue.Empty:
                    return
                with self._failing(task, "compile"):
                    compiled = compiler.ask({"region": task.region, "size": task.size})
                    self._on_event(Event("compiled", task, compiled["seconds"]))
                    checks.put(_Compiled(task, compiled["seconds"], compiled["signature"]))

    def _check_all(self, checks: _Checks) -> None:
        """One checker child, replaced when it dies, until it is told that nothing more will come."""
        with self._child("warmup.check_worker", _CHECKER) as checker:
            while (compiled := checks.get()) is not None and not self._stopped.is_set():
                task = compiled.task
                with self._failing(task, "self-check"):
                    checker.ask({"region": task.region, "size": task.size})
                    with self._failing(task, "record"):
                        self._record(task, compiled.signature)
                        self._on_event(Event("built", task, compiled.seconds))

    @contextlib.contextmanager
    def _compiler(self) -> Iterator[ReplaceableChild]:
        with contextlib.ExitStack() as scope:
            environment = self._environment
            if self._own_caches:
                folder = tempfile.TemporaryDirectory(prefix="snapcap-build-", ignore_cleanup_errors=True)
                environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": scope.enter_context(folder)}
            yield scope.enter_context(self._child("warmup.build_worker", environment))

    @contextlib.contextmanager
    def _child(self, module: str, environment: Mapping[str, str]) -> Iterator[ReplaceableChild]:
        child = ReplaceableChild(self._children, module, environment)
        try:
            yield child
        finally:
            child.close()

    @contextlib.contextmanager
    def _failing(self, task: Task, stage: str) -> Iterator[None]:
        """A package that cannot be made is noted with the stage; the others are made all the same."""
        try:
            yield
        except (ChildError, OSError) as error:
            if self._stopped.is_set():
                return
            reason = f"{stage}: {error}"
            with self._progress.lock:
                self._progress.failures[task.entry] = reason
            self._on_event(Event("failed", task, error=reason))

    def _record(self, task: Task, signature: Signature) -> None:
        """Beside the package: what it is and that it passed; without it a package counts as not made."""
        path = self._folder / task.entry
        blob = describe(path)
        record = {"digest": blob.digest, "size": blob.size, "signature": signature}
        temporary = path.with_suffix(".json.part")
        temporary.write_text(json.dumps(record))
        temporary.replace(path.with_suffix(".json"))
        self._done(task, path, signature)

    def _keep(self, task: Task) -> bool:
        """Take over a package of an earlier run, if it is still what was checked then."""
        path = self._folder / task.entry
        try:
            record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
            blob = describe(path)
            if [blob.digest, blob.size] != [record["digest"], record["size"]]:
                return False
            self._done(task, path, record["signature"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _done(self, task: Task, path: Path, signature: Signature) -> None:
        with self._progress.lock:
            self._progress.files[task.entry] = path
            self._progress.signatures[task.entry] = signature
