"""Loads a checkpoint as torch's tensors, and drives their device. Needs torch's module.

torch's precision and threads are set only here, once, on the thread that will run the regions. A CUDA device is
driven by copies, events and graphs on the current stream."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.layers.weights import takes
from snapcap.models.memory.torch_memory import TorchDeviceMemory, TorchHostMemory, torch_memory
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.table import Regions, Weights, build_regions
from snapcap.models.weights.load import load_weights, prepared_weights
from snapcap.models.weights.prepared import MappedWeights
from snapcap.warmup.errors import StartError
from snapcap.warmup.machine.cuda_driver import NO_GPU
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.runtime.aoti.launch_ahead import GraphEdges
from snapcap.warmup.runtime.devices import Captured, CpuDevice, Device, DeviceHealth, PendingTokens, Pixels
from snapcap.warmup.runtime.model import Model, check_weights

_logger = logging.getLogger("snapcap.weights")


class CudaDevice:
    """Implements `Device` for CUDA, which works asynchronously."""

    runs_ahead = True
    lanes = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph_pool: Any = None  # made with the first graph; graphs share it, as only one runs at a time
        self._edges: GraphEdges | None = None  # made with the pool
        self.memory = TorchDeviceMemory(device)
        self._probe = self.memory.zeros("uint8", (1,))

    def staging(self, pixels: Tensor, slots: Tensor) -> "_Staging":
        return _Staging(pixels, slots)

    def readback(self, tokens: Tensor) -> "_Readback":
        return _Readback(tokens)

    def read(self, buffer: Tensor) -> "np.ndarray[Any, Any]":
        return buffer.cpu().numpy()

    def record(self, run: Callable[[], Tensor]) -> Captured[Tensor]:
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
            self._edges = GraphEdges.of_device(torch.cuda.get_device_capability(self._device)[0])
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Thread-local mode: calls of other threads, such as those that decode images, must not break the capture.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            output = run()
        if self._edges is not None:
            self._edges.launch_ahead(graph.raw_cuda_graph())
        graph.instantiate()
        return _Graph(graph, output)

    def timer(self) -> "_Timer":
        return _Timer()

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def health(self, error: Exception) -> DeviceHealth:
        """Returns the health of the device. Waits for it, because a kernel reports its error only at its end."""
        try:
            self.wait()
            self._probe.tolist()  # a copy to the host needs no memory of the device
        except Exception:
            return "lost"
        # The driver's own lack of memory is a plain RuntimeError.
        memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        return "out_of_memory" if memory else "failed"

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.output


class _Staging:
    """Copies images from pinned memory on a separate stream, while the compute stream still does earlier work:

    copies    [ batch 2 → arrival ]           [ batch 3 → arrival ]
    compute   [ encode 1, steps ][ take ][ encode 2, steps ][ take ]…"""

    def __init__(self, pixels: Tensor, slots: Tensor) -> None:
        self._targets = (pixels, slots)
        self._host = tuple(torch.zeros_like(t, device="cpu", pin_memory=True) for t in self._targets)
        self._arrival = tuple(torch.empty_like(target) for target in self._targets)
        self._stream = torch.cuda.Stream(pixels.device)  # type: ignore[no-untyped-call]
        self._arrived, self._taken = event(), event()

    def copy(self, images: Sequence[Pixels], slots: Sequence[int]) -> None:
        pixels, host_slots = self._host
        self._arrived.synchronize()  # the host's buffers have been read
        np.stack(images, out=pixels[: len(images)].numpy())
        host_slots[: len(slots)].numpy()[:] = slots
        batch = (pixels[: len(images)], host_slots[: len(slots)])
        arrival = [place[: len(source)] for place, source in zip(self._arrival, batch, strict=True)]
        with torch.cuda.stream(self._stream):
            self._taken.wait()
            for place, source in zip(arrival, batch, strict=True):
                place.copy_(source, non_blocking=True)
            self._arrived.record()
        self._arrived.wait()
        for target, place in zip(self._targets, arrival, strict=True):
            target[: len(place)].copy_(place, non_blocking=True)
        self._taken.record()


class _Readback:
    """Implements `Readback` with two places: the host reads one step's tokens while the next step runs."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._places = [_Place(tokens), _Place(tokens)]

    def start(self, rows: int, outcomes: Tensor | None = None) -> PendingTokens:
        self._places.reverse()
        return self._places[0].copy(self._tokens[:rows], None if outcomes is None else outcomes[:rows])


class _Place:
    """Holds pinned memory for one step's results."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = torch.empty_like(tokens, device="cpu", pin_memory=True)
        self._outcomes: Tensor | None = None
        self._event = event()

    def copy(self, tokens: Tensor, outcomes: Tensor | None) -> PendingTokens:
        rows = len(tokens)
        self._tokens[:rows].copy_(tokens, non_blocking=True)
        copied = None
        if outcomes is not None:
            if self._outcomes is None:
                shape = (len(self._tokens), outcomes.shape[1])
                self._outcomes = torch.empty(shape, dtype=outcomes.dtype, pin_memory=True)
            copied = self._outcomes[:rows].copy_(outcomes, non_blocking=True).numpy()
        self._event.record()
        return PendingTokens(self._event.synchronize, self._tokens[:rows].numpy(), copied)


class _Timer:
    """Implements `Timer` with events in the stream, because the host runs ahead of the device."""

    def __init__(self) -> None:
        self._start, self._end = event(timing=True), event(timing=True)
        self._start.record()

    def stop(self) -> "_Timer":
        self._end.record()
        return self

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000.0


def event(timing: bool = False) -> torch.cuda.Event:
    """Returns a new CUDA event, for which the host can wait. ``timing``: the event records its time."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def open_device(plan: Plan) -> tuple[torch.device, torch.dtype]:
    """Returns the plan's device and dtype, and sets grad mode, threads and precision for the calling thread.

    Compiled graphs depend on these settings, so no other code may change them. Matrix products stay in full fp32
    ("highest"), so that tokens equal transformers'. Raises StartError if torch cannot use the device."""
    device = torch.device(plan.device)
    torch.set_grad_enabled(False)
    torch.set_num_threads(plan.threads)
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartError(f"device {plan.device}: torch has no usable CUDA device here; {NO_GPU}")
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartError(f"device {plan.device}: this machine has {torch.cuda.device_count()} CUDA devices")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device, DTYPES[plan.dtype]


def avoid_driver_compilation() -> None:
    """Keep torch from choosing kernels that the driver compiles at their first launch.

    cuDNN ships its attention as PTX. In a new container the driver has no cache yet and compiles it: 0.4 s of the
    first caption on an H200. Torch's other kernels are binaries for this processor. The setting is for eager region
    functions: a package's kernels were chosen by its build, and `torch.compile` should choose the fastest."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def torch_device(device: torch.device) -> Device[Tensor]:
    """Returns the device for a runner over torch's tensors."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice(TorchHostMemory())


class LoadedModel(Model[Tensor]):
    """A model of torch's tensors."""

    @property
    def device(self) -> torch.device:
        return self.state.tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and caches."""
        return self.state.key.dtype


def load_model(
    folder: Path,
    config: ModelConfig,
    transform: ImageTransform,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    prepared: MappedWeights | None = None,
) -> LoadedModel:
    """Read the weights of a checkpoint folder and allocate the buffers of the plan. ``prepared``: prepared weights
    of the checkpoint, if any. Then the checkpoint's weights are not read, unless the prepared weights do not match
    the configuration. Raises WeightsError if the weights cannot be read or do not fit the configuration."""
    regions = build_regions(config)
    found = None if prepared is None else _prepared(prepared, regions, device)
    weights = found or load_weights(folder, config, transform.normalisation, device, dtype)
    state = plan.decode_state(config, torch_memory(device))
    return LoadedModel(config, regions, weights, state, found is not None)


def _prepared(mapped: MappedWeights, regions: Regions, device: torch.device) -> Weights[Tensor] | None:
    """Returns the prepared weights on the device; None if they cannot be used, so that the checkpoint is read."""
    try:
        check_weights(mapped, regions)
        for region in regions:
            if not takes(region.function, len(mapped.header.regions[region.weights_name][0])):
                raise ValueError(f"the region {region.name} takes another number of weights")
        return prepared_weights(mapped, device)
    except Exception:
        _logger.exception("prepared weights are not used; the checkpoint is read")
        return None
