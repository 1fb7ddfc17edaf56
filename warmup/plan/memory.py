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
from snapcap.models.errors import UserError
from snapcap.models.fields import json_or_empty
from snapcap.models.memory.memory import ITEM_BYTES, spec_bytes
from snapcap.models.regions.table import Region, Regions, build_regions, region_inputs
from snapcap.models.weights.listing import weight_files
from snapcap.warmup.machine.cuda_driver import CudaDriverError, free_device_memory
from snapcap.warmup.machine.own_imports import child_environment, python_module
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint, config_of
from snapcap.warmup.plan.plan import Plan, PlannedBuffers, make_plan, planned_buffers

_logger = logging.getLogger("snapcap.start")

GIB = 1 << 30
# Bytes of any process that uses a GPU: its context, the kernels of torch and cuBLAS, and their workspaces.
PROCESS_BYTES = 700 << 20
# Further bytes of a process that serves: CUDA graphs, kernels of packages, and gaps between blocks.
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
    def buffers(self) -> PlannedBuffers:
        """The result of ``planned_buffers``."""
        return planned_buffers(self.config, self.plan)

    def work(self, region: Region, rows: int) -> int:
        """Returns the most bytes that a region takes at a bucket of ``rows``: its result and working memory,
        without its inputs."""
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
        """Returns the most bytes that compiling or checking a package takes, without the process itself. A check
        holds the inputs twice, to compare two results. ``weights``: bytes of all weights of the model."""
        decoder = self.config.decoder
        tables = 2 * decoder.vocab_size * decoder.hidden_size * self._item  # and whatever else has one layer
        own = min(weights, tables if region.layers == 1 else weights // region.layers)
        return 2 * (sum(self._inputs(region, rows)) + own) + self.work(region, rows)

    def serving(self, weights: int) -> int:
        """Returns the most bytes that serving takes, without the process's context: weights, buffers, and the
        largest region's working memory."""
        return weights + self.buffers.size + self._largest_work + SERVING_BYTES

    @property
    def swap(self) -> int:
        """Bytes that a server may still take during a background build: a swap compares two sets of buffers, and
        the largest bucket may not have run yet."""
        return 2 * self.buffers.size + self._largest_work + SERVING_BYTES

    @property
    def _largest_work(self) -> int:
        return max(self.work(region, self.plan.sizes(region.component)[-1]) for region in self.regions)

    @property
    def _item(self) -> int:
        return spec_bytes((self.plan.activations, (1,), (1,)))

    def _inputs(self, region: Region, rows: int) -> list[int]:
        """Returns the bytes of each activation and cache that is an input of a region."""
        return [spec_bytes(each) for each in region_inputs(region, self.config, self.buffers.state, rows)]


def device_need(options: StartOptions, folder: Path) -> tuple[int, int]:
    """Returns the least and the most bytes of device memory for serving the checkpoint in ``folder``; 0 on a CPU.
    Raises the errors of reading the configuration and of ``make_plan``."""
    config = config_of(options, folder)
    plan = make_plan(config, options)
    if plan.device_type == "cpu":
        return 0, 0
    memory, weights = MemoryPlan(config, plan), checkpoint_bytes(folder, plan.dtype)
    return weights + memory.buffers.size, memory.serving(weights)


def plan_that_fits(config: ModelConfig, plan: Plan, weights: int, free: int) -> Plan:
    """Returns the plan with the buckets that fit into ``free`` bytes, and always the smallest one. Step buckets go
    first, all at once: the packages of every bucket depend on the number of slots, so each number of step buckets
    would need artifacts of its own. Then the largest buckets go, one by one. Step buckets stay while a bucket is
    larger: they need no further slots."""
    while len(plan.step_table.sizes) > 1 and MemoryPlan(config, plan).serving(weights) > free:
        steps_are_largest = plan.slots > plan.buckets[-1]
        plan = replace(plan, step_buckets=()) if steps_are_largest else replace(plan, buckets=plan.buckets[:-1])
    return plan


def checkpoint_bytes(folder: Path, dtype: str) -> int:
    """Returns the bytes of a checkpoint's weights in ``dtype``; 0 if the folder has no readable weights. Counts
    only the files that a start reads. Numbers of ``.bin`` files are taken for those of the dtype that the
    configuration names, or float32."""
    try:
        config = json_or_empty(folder / "config.json")
        stored = ITEM_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
        return spec_bytes((dtype, (1,), (1,))) * sum(_numbers(file, stored) for file in weight_files(folder))
    except (OSError, UserError, ValueError, KeyError, TypeError):
        return 0  # loading the weights will report an unreadable file


def _numbers(file: Path, item: int) -> int:
    """Returns how many numbers a file has: a safetensors file by its header, any other by the bytes of an item."""
    if file.suffix != ".safetensors":
        return file.stat().st_size // item
    with file.open("rb") as opened:
        header = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), 100 << 20)))
    header.pop("__metadata__", None)
    return sum(math.prod(tensor["shape"]) for tensor in header.values())


def gib(size: float) -> str:
    """Formats bytes as GiB, for messages."""
    return f"{size / GIB:.1f} GiB"


_CHILD_S = 30.0


def free_here(plan: Plan) -> int | None:
    """Returns the free bytes of the plan's GPU for this process, whose context is created first; None for a CPU, or
    if the driver does not answer."""
    if plan.device_type != "cuda":
        return None
    with contextlib.suppress(CudaDriverError, AttributeError):
        return free_device_memory(plan.device_index)
    return None


def free_for_another(plan: Plan) -> int | None:
    """Returns the free bytes of the plan's GPU for another process with its context. A child process measures them,
    so that this process takes no device memory. Returns None as ``free_here`` does."""
    if plan.device_type != "cuda":
        return None
    command = [*python_module(__name__), str(plan.device_index)]
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        asked = subprocess.run(  # noqa: S603  this interpreter and a module of ours
            command, capture_output=True, text=True, check=False, timeout=_CHILD_S, env=child_environment()
        )
        return int(asked.stdout)
    return None


def plan_of_server(checkpoint: Checkpoint, options: StartOptions) -> Plan:
    """Returns the plan of a server on this machine, with the buckets that fit into its GPU's memory."""
    plan = make_plan(checkpoint.config, options)
    return fitted(checkpoint, plan, free_for_another(plan))


def fitted(checkpoint: Checkpoint, plan: Plan, free: int | None, weights: int = 0) -> Plan:
    """Returns the plan without the largest buckets that do not fit. The log names these buckets. ``free``: free
    bytes of the GPU, of ``free_here`` or ``free_for_another``; None keeps every bucket. ``weights``: bytes of the
    weights; 0: computed from the checkpoint's files."""
    if free is None:
        return plan
    config, weights = checkpoint.config, weights or checkpoint_bytes(checkpoint.folder, plan.dtype)
    kept = plan_that_fits(config, plan, weights, free)
    if kept != plan:
        before, sizes = plan.step_table.sizes, kept.step_table.sizes
        dropped, used = ", ".join(str(size) for size in before if size not in sizes), ",".join(map(str, sizes))
        needed = MemoryPlan(config, plan).serving(weights)
        _logger.warning(
            f"{plan.device} has {gib(free)} free and the buckets up to {plan.slots} need {gib(needed)}: "
            f"bucket {dropped} is left out, {used} are used"
        )
    return kept


if __name__ == "__main__":
    import sys

    print(free_device_memory(int(sys.argv[1])))
