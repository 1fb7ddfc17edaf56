"""Prepares weights in a process of its own, beside a server that serves or before a build.

Converting takes seconds of Python and of a CPU, which no step of a server may wait for: so a process of the lowest
priority reads the checkpoint once more, on the CPU also where the model is on a GPU, whose stream stays the device
thread's. The file holds the tensors that `load_weights` returns. The process ends when its parent does.

    job   {"checkpoint": …, "plan": …, "store": …}, then {"thorough": …}

Run as ``python -m snapcap.warmup.weights.worker``.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.capacity import first_for_the_oom_killer
from snapcap.warmup.machine.worker import Task, Worker, WorkerError, serve_tasks
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.weights.prepare import Prepared, prepare_weights

TIME_LIMIT_S = 1800.0
_MODULE = "snapcap.warmup.weights.worker"


@dataclass(frozen=True)
class PrepareJob:
    """The checkpoint folder, the plan whose device and dtype the weights are for, and the artifact folder."""

    checkpoint: Path
    plan: Plan
    store: Path


def weights_worker(checkpoint: Path, plan: Plan, options: StartOptions, nice: int = 0) -> Worker:
    """A worker that has not begun; ``nice`` lowers its priority (0 to 19)."""
    job = PrepareJob(checkpoint, plan, options.store_folder.absolute())
    return Worker(_MODULE, job, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, nice)


def prepare_in_worker(worker: Worker, *, thorough: bool) -> Prepared:
    """``prepare_weights`` in the worker, which is ended; what goes wrong there is a reason for not having any."""
    with worker:
        try:
            answer = worker.ask({"thorough": thorough}, TIME_LIMIT_S)
        except WorkerError as error:
            return Prepared("skipped", str(error))
    return Prepared(answer["result"], answer["reason"])


def _start(job: PrepareJob) -> Task:
    first_for_the_oom_killer()

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        return asdict(prepare_weights(job.checkpoint, job.plan, job.store, thorough=task["thorough"]))

    return answer


if __name__ == "__main__":
    sys.exit(serve_tasks(PrepareJob, _start))
