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
    """One package to make. Without one that is called ``on_demand`` the set is used all the same.

    ``need``: bytes of device memory that compiling or checking it takes at most, beside its process.
    """

    entry: str
    region: str
    component: ComponentName
    size: int
    on_demand: bool = False
    need: int = 0


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
    everything is there that every start needs. ``library``: the CPU library, where all of it runs on that;
    ``no_library``: why there is none where there might be."""

    files: Mapping[str, VerifiedFile]
    input_specs: Mapping[str, InputSpecs]
    failures: Mapping[str, str]
    complete: bool
    library: VerifiedFile | None = None
    no_library: str = ""


@dataclass
class Progress:
    """What the threads of a build have come to."""

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
    from snapcap.warmup.plan.memory import MemoryPlan, checkpoint_bytes  # noqa: PLC0415  of no compiled start
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
