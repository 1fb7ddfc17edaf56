"""Counts the device memory that a model needs, before any of it is taken, and fits the plan to the GPU.

Buffers are counted exactly, from the configuration and the bucket table. The working memory of a region is bounded
by a multiple of its largest activation; a test compares this bound with torch's peak for each family. This module
imports no torch.
"""

import contextlib
import json
import logging
import math
import subprocess
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import ShapeMemory, Spec, spec_bytes
from snapcap.models.regions.state import BeamState, DecodeState
from snapcap.models.regions.table import Region, Regions, build_regions, region_inputs
from snapcap.warmup.machine.cuda_driver import CudaDriverError, free_device_memory
from snapcap.warmup.machine.own_imports import child_environment, python_module
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint, config_of
from snapcap.warmup.plan.plan import Plan, make_plan

_logger = logging.getLogger("snapcap.start")

GIB = 1 << 30
# A process that uses a GPU: its context, the kernels of torch and cuBLAS, and their workspaces.
PROCESS_BYTES = 700 << 20
# A process that serves, besides: CUDA graphs, kernels of packages, and gaps between blocks.
SERVING_BYTES = 400 << 20
# Activations of a transformer block, in sizes of its input: q, k, v, attention, and twice an inner layer four wide.
_ACTIVATIONS = 16
_PREFIX_ACTIVATIONS = 24  # decoder layers over many tokens: norms and rotations in float32, gated layers
_SMALL_BYTES = 64 << 20  # memory besides activations: comparisons, indices, biases


@dataclass(frozen=True)
class MemoryPlan:
    """Counts the bytes of device memory that a model needs under a plan."""

    config: ModelConfig
    plan: Plan

    @cached_property
    def regions(self) -> Regions:
        return build_regions(self.config)

    @cached_property
    def state(self) -> DecodeState[Spec]:
        """The buffers of the plan, described."""
        return self._state(self._memory())

    @cached_property
    def buffers(self) -> int:
        """Bytes of everything that slots hold, searches and images included."""
        memory, rows = self._memory(), self.plan.table.largest.size
        self._state(memory)
        BeamState.allocate(rows, self.plan.cache_length, memory)
        memory.zeros("uint8", (rows, *self.config.vision.image_size, 3))
        return memory.allocated

    def work(self, region: Region, rows: int) -> int:
        """Bytes that a region takes at most beside its inputs, its result included, for a bucket of ``rows``."""
        order = self.regions.of(region.component)
        place = order.index(region) if region in order else len(order)
        item = self._item
        shapes = region.hidden, *(each.hidden for each in order[place + 1 : place + 2])
        widest = [rows * math.prod(shape) * item for shape in shapes]
        if region.component == "decoder" and place >= len(order) - 1:  # the head, and those that choose tokens
            widest.append(rows * self.config.decoder.vocab_size * spec_bytes(("float32", (1,), (1,))))
        inputs = self._inputs(region, rows)
        more = sum(inputs) if region.writes else 0  # K/V are computed before they are written
        if region.input_names[0] == "pixels":
            more += inputs[0] * 4  # the float32 copy
        sizes = _PREFIX_ACTIVATIONS if region.name.startswith("prefix") else _ACTIVATIONS
        return sizes * max(widest) + more + _SMALL_BYTES

    def package(self, region: Region, rows: int, weights: int) -> int:
        """Bytes that compiling or checking a package takes at most, beside the process itself. A check holds the
        inputs twice, for two results that are compared. ``weights``: bytes of all weights of the model."""
        decoder = self.config.decoder
        tables = 2 * decoder.vocab_size * decoder.hidden_size * self._item  # and whatever else has one layer
        own = min(weights, tables if region.layers == 1 else weights // region.layers)
        return 2 * (sum(self._inputs(region, rows)) + own) + self.work(region, rows)

    def serving(self, weights: int) -> int:
        """Bytes that serving takes at most, beside the process's context: weights, buffers, and what the largest
        region takes while it runs."""
        return weights + self.buffers + self._largest_work + SERVING_BYTES

    @property
    def swap(self) -> int:
        """Bytes that a serving process may still take while packages are built beside it: a swap compares two sets
        of buffers, and the largest bucket may not have run yet."""
        return 2 * self.buffers + self._largest_work + SERVING_BYTES

    @property
    def _largest_work(self) -> int:
        return max(self.work(region, self.plan.table.largest.size) for region in self.regions)

    @property
    def _item(self) -> int:
        return spec_bytes((self.plan.activations, (1,), (1,)))

    def _memory(self) -> ShapeMemory:
        return ShapeMemory("cuda" if self.plan.device_type == "cuda" else "cpu")

    def _state(self, memory: ShapeMemory) -> DecodeState[Spec]:
        slots = self.plan.table.largest.size
        return DecodeState.allocate(self.config, slots, self.plan.cache_length, memory, self.plan.activations)

    def _inputs(self, region: Region, rows: int) -> list[int]:
        """Bytes of each activation and cache that a region takes."""
        return [spec_bytes(each) for each in region_inputs(region, self.config, self.state, rows)]


def device_need(options: StartOptions, folder: Path) -> tuple[int, int]:
    """Bytes of device memory that serving the checkpoint in ``folder`` takes at least, and at most; 0 on a CPU.
    Raises what reading the configuration and ``make_plan`` raise."""
    config = config_of(options, folder)
    plan = make_plan(config, options)
    if plan.device_type == "cpu":
        return 0, 0
    memory, weights = MemoryPlan(config, plan), checkpoint_bytes(folder, plan.dtype)
    return weights + memory.buffers, memory.serving(weights)


def buckets_that_fit(config: ModelConfig, plan: Plan, weights: int, free: int) -> tuple[int, ...]:
    """The plan's bucket sizes without the largest, which do not fit ``free`` bytes; at least the smallest one."""
    sizes = plan.buckets
    while len(sizes) > 1 and MemoryPlan(config, replace(plan, buckets=sizes)).serving(weights) > free:
        sizes = sizes[:-1]
    return sizes


def checkpoint_bytes(folder: Path, dtype: str) -> int:
    """Bytes that the weights of a checkpoint folder take in ``dtype``; 0 where it has none that can be read."""
    item = spec_bytes((dtype, (1,), (1,)))
    files = [*folder.glob("*.safetensors")]
    try:
        if files:
            return item * sum(map(_numbers, files))
        return item * sum(file.stat().st_size // 4 for file in folder.glob("*.bin"))
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # a file that cannot be read is an error of those who load it


def _numbers(file: Path) -> int:
    """The numbers in a safetensors file, by its header."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), 100 << 20)))
    header.pop("__metadata__", None)
    return sum(math.prod(tensor["shape"]) for tensor in header.values())


def gib(size: float) -> str:
    """Bytes in GiB, to be read."""
    return f"{size / GIB:.1f} GiB"


_CHILD_S = 30.0


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


def plan_of_server(checkpoint: Checkpoint, options: StartOptions) -> Plan:
    """Returns the plan that a server on this machine makes, with the buckets for which its GPU has room."""
    plan = make_plan(checkpoint.config, options)
    return fitted(checkpoint, plan, free_for_another(plan))


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
        dropped, used = ", ".join(str(size) for size in plan.buckets if size not in kept), ",".join(map(str, kept))
        needed = MemoryPlan(config, plan).serving(weights)
        _logger.warning(
            f"{plan.device} has {gib(free)} free and the buckets up to {plan.buckets[-1]} need {gib(needed)}: "
            f"bucket {dropped} is left out, {used} are used"
        )
    return replace(plan, buckets=kept)


if __name__ == "__main__":
    import sys

    print(free_device_memory(int(sys.argv[1])))
