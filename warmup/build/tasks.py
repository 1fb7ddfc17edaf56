"""Describes a build: what is to be made, what happened to it, and what came of it."""

import threading
import time
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from snapcap.models.dataclass import dataclass
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import ComponentName
from snapcap.warmup.runtime.aoti.packages import InputSpecs
from snapcap.warmup.store.blobs import VerifiedFile

EventKind = Literal["kept", "compiled", "built", "failed"]


@dataclass(frozen=True)
class Task:
    """Describes a package to build.

    on_demand: the artifact set is complete without this package.
    need: bytes of device memory that compiling or checking the package takes at most, besides its process.
    """

    entry: str
    region: str
    component: ComponentName
    size: int
    on_demand: bool = False
    need: int = 0


@dataclass(frozen=True)
class Event:
    """Reports the progress of a package. ``kept``: an earlier run built it; ``built``: compiled and checked."""

    kind: EventKind
    task: Task
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Built:
    """Holds the results of a build.

    files, input_specs: packages and their input specs, by entry name.
    failures: the reason of each failed package, by entry name.
    complete: every package that every start needs is built.
    library: the CPU library, if all packages run on it.
    no_library: the reason why there is no CPU library, if the plan allows one.
    """

    files: Mapping[str, VerifiedFile]
    input_specs: Mapping[str, InputSpecs]
    failures: Mapping[str, str]
    complete: bool
    library: VerifiedFile | None = None
    no_library: str = ""


@dataclass
class Progress:
    """Holds the results so far of a build's threads."""

    files: dict[str, VerifiedFile] = field(default_factory=dict)
    input_specs: dict[str, InputSpecs] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    library: VerifiedFile | None = None
    no_library: str = ""
    passed_on: dict[str, str] = field(default_factory=dict)  # by entry, the digest of the library it runs on
    lock: threading.Lock = field(default_factory=threading.Lock)
    moved: float = field(default_factory=time.monotonic)  # when something was made last, or failed by itself


def tasks_of(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """Every package of the set, smallest buckets first."""
    from snapcap.warmup.plan.memory import MemoryPlan, checkpoint_bytes  # noqa: PLC0415  compiled starts do not need it
    from snapcap.warmup.runtime.aoti.packages import entry_names  # noqa: PLC0415

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
        for region, bucket, entry in entry_names(memory.regions, plan.buckets)
    ]
