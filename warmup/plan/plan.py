"""Decides from the model and the machine which device, dtype, threads and batch sizes a start uses. No torch.

The artifact key is computed from the plan, so it is known before torch is imported.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from snapcap.models.config import IMAGE_TOKENS, ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.text import Task
from snapcap.warmup.artifacts.key import Factors, build_factors, machine_factors
from snapcap.warmup.errors import StartError
from snapcap.warmup.machine.capacity import all_but_one, multiplies_bfloat16, whole_cpus
from snapcap.warmup.machine.cuda_driver import CudaDriverError, total_device_memory
from snapcap.warmup.machine.installation import MachineError, resolve_device
from snapcap.warmup.options import ComputeOptions, Kind, StartOptions

if TYPE_CHECKING:
    from snapcap.models.memory.memory import B, Memory, Spec
    from snapcap.models.regions.state import DecodeState

DEFAULT_BUCKETS = {"cuda": (1, 4, 16, 64), "cpu": (1, 4, 8)}
# Sizes of decode steps alone. On a GPU a step of 256 rows takes little longer than a step of 64 rows, but an encode
# of 256 images takes as long as four encodes of 64. Sizes between 16 and 64 spare padding.
STEP_BUCKETS = (24, 32, 48, 96, 128, 256)
# A step bucket is left out if with it all buffers take more than this part of the GPU's whole memory. The free
# memory must not decide: the artifact key depends on the sizes, so that a build and a server on the same card need
# the same sizes.
BUFFER_PART = 1 / 8
DEFAULT_CACHE_LENGTH = 64
AUTO = "auto"
LONG_ENCODE = 2 * 10**9  # multiplications for an image; some 40 ms on one CPU
INSTRUCTION_TOKENS = 64  # tokens of the cache for an instruction, if the model takes instructions

InductorOption = str | int | bool


@dataclass(frozen=True)
class Bucket:
    """Names a compiled batch size: ``size`` rows, of which the last may be padding."""

    size: int


@dataclass(frozen=True)
class BucketTable:
    """Lists the buckets of encodes, or of decode steps, in ascending order."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> "BucketTable":
        """Sort and check sizes. Raises ValueError if there are none, one is below 1, or one is named twice."""
        ordered = tuple(sorted(sizes))
        if not ordered or ordered[0] < 1 or len(set(ordered)) != len(ordered):
            raise ValueError(f"bucket sizes must be distinct positive numbers, not {list(ordered)}")
        return cls(tuple(Bucket(size) for size in ordered))

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(bucket.size for bucket in self.buckets)

    def fit(self, rows: int) -> Bucket:
        """Returns the smallest bucket that holds ``rows``. Raises ValueError if ``rows`` is below 1 or above the
        largest bucket."""
        if rows < 1:
            raise ValueError(f"a batch has at least one row, not {rows}")
        for bucket in self.buckets:
            if bucket.size >= rows:
                return bucket
        raise ValueError(f"{rows} rows do not fit the largest bucket, {self.largest.size}")

    def admit(self, waiting: int) -> int:
        """Returns how many of ``waiting`` rows to encode at once, at least one.

        Padding rows cost encode time, on a CPU as much as real rows. If more than a third of the bucket that holds
        all rows would be padding, the largest bucket that they fill is used, and the other rows follow."""
        rows = min(waiting, self.largest.size)
        if 3 * rows >= 2 * self.fit(rows).size:
            return rows
        return max((size for size in self.sizes if size <= rows), default=rows)


@dataclass(frozen=True)
class Plan:
    """Holds everything besides the model's dimensions that decides how regions are compiled.

    device: cpu or cuda:N. dtype: the name of a torch dtype; int8 is the dtype only of linear layers' weights.
    buckets: the sizes of encodes, which are sizes of decode steps too. step_buckets: further sizes, of decode steps
    alone. threads: CPU threads of one operation. text_tokens: the argument of `ModelConfig.with_text_tokens`.
    image_tokens: the most tokens of a picture of any shape."""

    device: str
    dtype: str
    buckets: tuple[int, ...]
    cache_length: int
    threads: int
    encoder_mode: str = "default"
    decoder_mode: str = "default"
    text_tokens: int = 0
    image_tokens: int = IMAGE_TOKENS
    step_buckets: tuple[int, ...] = ()

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def device_index(self) -> int:
        return int(self.device.partition(":")[2] or 0)

    @property
    def activations(self) -> str:
        """The dtype of activations, and of the keys and values of text."""
        return "float32" if self.dtype == "int8" else self.dtype

    def image_kv(self, config: ModelConfig) -> str:
        """The dtype of the keys and values of images, which decode steps only read.

        With weights of int8, reading these in float32 would be a large part of a step of many rows. But where heads
        of queries share them, they are fewer, and converting them took as long as it saved: a step of eight rows of
        SmolVLM-256M took 8 ms either way."""
        shared = config.decoder.kv_heads != config.decoder.num_heads
        return "bfloat16" if self.dtype == "int8" and not shared else self.activations

    def decode_state(self, config: ModelConfig, memory: "Memory[B]") -> "DecodeState[B]":
        """Allocates the buffers of all slots."""
        from snapcap.models.regions.state import DecodeState  # noqa: PLC0415  imports numpy

        dtypes = self.activations, self.image_kv(config)
        return DecodeState.allocate(config, self.slots, self.cache_length, memory, *dtypes)

    @property
    def table(self) -> BucketTable:
        """The buckets of encodes."""
        return BucketTable.of(self.buckets)

    @property
    def step_table(self) -> BucketTable:
        """The buckets of decode steps."""
        return BucketTable.of((*self.buckets, *self.step_buckets))

    @property
    def slots(self) -> int:
        """The greatest number of rows that run together."""
        return self.step_table.largest.size

    def sizes(self, component: str) -> tuple[int, ...]:
        """The bucket sizes of ``encoder`` or ``decoder``."""
        return (self.table if component == "encoder" else self.step_table).sizes

    def pinned(self, options: StartOptions) -> StartOptions:
        """Returns the options with the sizes of this plan."""
        compute = replace(options.compute, buckets=self.buckets, step_buckets=self.step_buckets)
        return replace(options, compute=compute)

    def mode(self, component: str) -> str:
        """The compile mode of ``encoder`` or ``decoder``."""
        return self.encoder_mode if component == "encoder" else self.decoder_mode

    def takes_cudnn_attention(self, component: str) -> bool:
        """Returns whether packages of a component may call cuDNN's attention; otherwise they call only kernels that
        torch has in binary form.

        On an H200 cuDNN's attention makes encodes of 16 and 64 images 4 to 6 % faster. But cuDNN ships it as PTX,
        which the driver compiles in every new container, and makes a plan for each bucket: 0.6 s of a start. So
        only max-autotune allows it."""
        return self.mode(component) == "max-autotune"

    @property
    def may_be_standalone(self) -> bool:
        """True if packages of this plan may run on the CPU library, without libtorch."""
        return self.device_type == "cpu" and self.activations == "float32"

    @property
    def runs_on_libtorch(self) -> bool:
        """False if packages of this plan run only on the CPU library: libtorch's product by int8 weights takes
        twenty times as long as a float32 product."""
        return self.dtype != "int8"

    def factors(self, config: ModelConfig, kind: Kind) -> Factors:
        """The named factors of the artifact key for this plan on this machine. Raises StartError if the machine
        cannot be described."""
        model = {
            **config.dimensions(),
            "dtype": self.dtype,
            "buckets": self.buckets,
            "cache_length": self.cache_length,
        }
        if self.step_buckets:
            model["step_buckets"] = self.step_buckets
        compilation: dict[str, Any] = {
            "encoder": {"mode": self.encoder_mode, **inductor_options(self.encoder_mode, self.device_type)},
            "decoder": {"mode": self.decoder_mode, **inductor_options(self.decoder_mode, self.device_type)},
            "float32_matmul_precision": "highest",
            "threads": self.threads if self.device_type == "cpu" else None,
        }
        try:
            return build_factors(machine_factors(self.device), kind, model, compilation)
        except MachineError as error:
            raise StartError(str(error)) from error


@dataclass(frozen=True)
class PlannedJob:
    """Holds the first message to a worker that builds packages or prepares weights for a plan: the checkpoint's
    folder, the plan, and the folder for the results."""

    checkpoint: Path
    plan: Plan
    folder: Path


def inductor_options(mode: str, device_type: str) -> dict[str, InductorOption]:
    """Returns the options for ``torch._inductor`` by their dotted names; the same for aot and jit.

    ``max-autotune`` benchmarks GEMM templates against the libraries' kernels. On cuda, kernels are embedded in the
    package, so that a server starts no compiler and needs no cache folder. The columns of a product are not padded:
    Inductor would decide that by measuring, and the next package, which is compiled for rows without padding, would
    read wrong numbers."""
    options: dict[str, InductorOption] = {}
    if mode == "max-autotune":
        options["max_autotune"] = True
    if device_type == "cuda":
        options["aot_inductor.embed_kernel_binary"] = True
        options["shape_padding"] = False
        # Otherwise every compiler process would start its own pool.
        options["aot_inductor.precompile_headers"] = False
    return options


def make_plan(config: ModelConfig, options: StartOptions) -> Plan:
    """Returns the plan for these options, and decides the values that they leave open. Raises StartError if an
    option does not fit the model or the machine."""
    task, compute = options.model.task, options.compute
    if task and Task.find(task, config.tasks) is None:
        known = ", ".join(each.name for each in config.tasks)
        raise StartError(f"task {task}: this model has {known or 'one task alone, so leave it out'}")
    device, dtype = device_and_dtype(compute)
    if dtype == AUTO:
        dtype = config.dtype_on_cpu
    kind = device.partition(":")[0]
    try:
        table = BucketTable.of(compute.buckets or DEFAULT_BUCKETS[kind])
    except ValueError as error:
        raise StartError(f"buckets: {error}") from None
    plan = Plan(
        device=device,
        dtype=dtype,
        buckets=table.sizes,
        cache_length=_cache_length(config, options),
        threads=compute.threads or _threads(config),
        encoder_mode=compute.encoder_mode,
        decoder_mode=compute.decoder_mode,
        text_tokens=options.model.text_tokens,
        image_tokens=options.images.max_image_tokens,
    )
    return replace(plan, step_buckets=_step_buckets(config, compute, plan))


def _step_buckets(config: ModelConfig, compute: ComputeOptions, plan: Plan) -> tuple[int, ...]:
    """Returns the sizes of decode steps alone, beside those of a plan without any. Raises StartError if an explicit
    size cannot be one."""
    asked = compute.step_buckets
    if asked is None:
        none = plan.device_type == "cpu" or compute.buckets or compute.backend == "jit"
        return () if none else _affordable(config, plan)
    for size in asked:
        if size in plan.buckets:
            raise StartError(f"step_buckets: {size} is in --buckets too, and each of these sizes runs decode steps")
        if size < plan.buckets[0]:
            raise StartError(f"step_buckets: {size} is below the smallest of --buckets, {plan.buckets[0]}")
    try:
        return BucketTable.of(asked).sizes if asked else ()
    except ValueError as error:
        raise StartError(f"step_buckets: {error}") from None


def _affordable(config: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """Returns the sizes of ``STEP_BUCKETS`` with which all buffers take at most ``BUFFER_PART`` of a GPU;
    none if the driver does not tell its memory."""
    needs = {size: planned_buffers(config, replace(plan, step_buckets=(size,))).size for size in STEP_BUCKETS}
    try:
        # Whole GiB, because drivers of one card differ by some hundred MiB.
        most = (total_device_memory(plan.device_index) >> 30 << 30) * BUFFER_PART
    except (CudaDriverError, AttributeError):
        return ()
    return tuple(size for size, need in needs.items() if need <= most)


class PlannedBuffers(NamedTuple):
    """Holds the shapes and dtypes of a plan's decode state, and the bytes of all buffers: of the slots, including
    beam searches, and of images."""

    state: "DecodeState[Spec]"
    size: int


def planned_buffers(config: ModelConfig, plan: Plan) -> PlannedBuffers:
    """Describes the buffers of a plan. Allocates none."""
    from snapcap.models.memory.memory import ShapeMemory  # noqa: PLC0415  only a GPU's plan counts them
    from snapcap.models.regions.state import BeamState  # noqa: PLC0415  imports numpy

    memory = ShapeMemory("cuda" if plan.device_type == "cuda" else "cpu")
    state = plan.decode_state(config, memory)
    BeamState.allocate(plan.slots, plan.cache_length, memory)
    memory.zeros("uint8", (plan.table.largest.size, *config.vision.image_size, 3))
    return PlannedBuffers(state, memory.allocated)


def device_and_dtype(compute: ComputeOptions) -> tuple[str, str]:
    """Returns the device and dtype of the options, without reading the model. On a CPU with bfloat16 instructions
    the dtype stays ``auto``: a checkpoint stored in bfloat16 runs in bfloat16, any other in float32. Raises
    StartError if the device does not support the dtype."""
    device, dtype = resolve_device(compute.device), compute.dtype
    if dtype == "int8" and device.startswith("cuda"):
        raise StartError("dtype int8: only a CPU runs it; leave --dtype out, or take --device cpu")
    if dtype == AUTO and device.startswith("cuda"):
        dtype = "bfloat16"
    elif dtype == AUTO and not multiplies_bfloat16():
        dtype = "float32"
    return device, dtype


def _threads(config: ModelConfig) -> int:
    """Returns all CPUs for a model with long encodes, and all but one for other models.

    The threads of an operation wait for each other, so if one thread waits for a CPU, all do. The demo model's
    server spends a third of its time on HTTP and decoding images, and on 2 CPUs answered under load with 2 threads
    three quarters as many requests as with 1. For larger models this share is negligible, and one CPU less makes
    them slower in proportion (benchmarks/NOTES.md has both)."""
    return whole_cpus() if config.vision.multiplications >= LONG_ENCODE else all_but_one()


def _cache_length(config: ModelConfig, options: StartOptions) -> int:
    """Returns the positions of a row's cache: as set, or enough for the model's default length and a prompt."""
    positions = config.decoder.n_positions
    generated = max(config.generation.max_length, options.model.max_new_tokens + 1)
    instruction = 0 if config.chat is None else INSTRUCTION_TOKENS
    length = options.model.cache_length or min(positions, max(DEFAULT_CACHE_LENGTH, generated + instruction))
    if not 2 <= length <= positions:
        raise StartError(f"cache_length {length}: this model has positions for 2 to {positions} tokens")
    return length
