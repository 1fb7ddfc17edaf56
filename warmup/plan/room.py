"""Fits a plan to the GPU that is there: what is free now, and which buckets have room."""

import contextlib
import logging
import subprocess
from dataclasses import replace

from snapcap.warmup.machine.cuda_driver import CudaDriverError, free_device_memory
from snapcap.warmup.machine.own_imports import child_environment, python_module
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.memory import MemoryPlan, buckets_that_fit, checkpoint_bytes, too_large
from snapcap.warmup.plan.plan import Plan

_CHILD_S = 30.0
_logger = logging.getLogger("snapcap.start")


def device_index(plan: Plan) -> int:
    """The number of the plan's GPU."""
    return int(plan.device.partition(":")[2] or 0)


def free_here(plan: Plan) -> int | None:
    """Bytes of the plan's GPU that this process may take beside its context, which is made; None for a CPU, and
    where the driver does not say."""
    if plan.device_type != "cuda":
        return None
    with contextlib.suppress(CudaDriverError, AttributeError):
        return free_device_memory(device_index(plan))
    return None


def free_for_another(plan: Plan) -> int | None:
    """Bytes of the plan's GPU that another process may take beside its context, as a process of its own finds out:
    this one takes none. None as above."""
    if plan.device_type != "cuda":
        return None
    command = [*python_module(__name__), str(device_index(plan))]
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        asked = subprocess.run(  # noqa: S603  this interpreter and a module of ours
            command, capture_output=True, text=True, check=False, timeout=_CHILD_S, env=child_environment()
        )
        return int(asked.stdout)
    return None


def fitted(checkpoint: Checkpoint, plan: Plan, free: int | None, weights: int = 0) -> Plan:
    """The plan without the largest buckets that do not fit, which the log names.

    Args:
        free: bytes, as above; None keeps every bucket.
        weights: bytes of the weights, where they are known; 0: as the checkpoint's files have them.
    """
    if free is None:
        return plan
    config, weights = checkpoint.config, weights or checkpoint_bytes(checkpoint.folder, plan.dtype)
    kept = buckets_that_fit(config, plan, weights, free)
    if kept != plan.buckets:
        _logger.warning(too_large(plan, kept, MemoryPlan(config, plan).serving(weights), free))
    return replace(plan, buckets=kept)


if __name__ == "__main__":
    import sys

    print(free_device_memory(int(sys.argv[1])))
