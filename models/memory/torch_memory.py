"""Makes buffers of torch's tensors, on a CPU or another device."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from snapcap.models.memory.memory import CopySlots, HostMemory, Memory, Spec, row_major


def torch_memory(device: torch.device) -> Memory[Tensor]:
    """Returns the memory of a device."""
    return TorchHostMemory() if device.type == "cpu" else TorchDeviceMemory(device)


class _TorchMemory:
    """The part of a `Memory` that is alike on all devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
        strides, kind = tuple(row_major(shape) if strides is None else strides), getattr(torch, dtype)
        return torch.empty_strided(tuple(shape), strides, dtype=kind, device=self._device).zero_()

    def spec(self, buffer: Tensor) -> Spec:
        return spec_of(buffer)

    def view(self, buffer: Tensor, *index: int | slice) -> Tensor:
        return buffer[index]


class TorchHostMemory(_TorchMemory, HostMemory[Tensor]):
    """Tensors of a CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def array(self, buffer: Tensor) -> "np.ndarray[Any, Any]":
        return (buffer.view(torch.int16) if buffer.dtype == torch.bfloat16 else buffer).numpy()


class TorchDeviceMemory(_TorchMemory):
    """Tensors of a device that works asynchronously. All calls queue work, and none waits for it."""

    kind: Literal["cuda"] = "cuda"

    def array(self, buffer: Tensor) -> None:
        return None

    def write(self, buffer: Tensor, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        """Copies asynchronously. The driver reads values in pageable memory before the call returns, so they may
        change."""
        first, count = slots[0], len(slots)
        if list(slots) == list(range(first, first + count)):
            buffer[first : first + count].copy_(torch.from_numpy(values), non_blocking=True)
            return
        target = torch.tensor(slots).to(self._device, non_blocking=True)
        buffer.index_copy_(0, target, torch.from_numpy(values).to(self._device, non_blocking=True))

    def copier(self, buffers: Sequence[tuple[Tensor, int]]) -> CopySlots:
        return _Copier(buffers)


class _Copier:
    """Copies slots with one launch for up to 64 views (`_held`), without uploading an index and without waiting."""

    def __init__(self, buffers: Sequence[tuple[Tensor, int]]) -> None:
        self._kinds = _flat(buffers)
        self._views: dict[int, list[list[Tensor]]] = {}

    def __call__(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        to, of = [self._held(slot) for slot in targets], [self._held(slot) for slot in sources]
        for kind in range(len(self._kinds)):
            torch._foreach_copy_(
                [view for held in to for view in held[kind]], [view for held in of for view in held[kind]]
            )

    def _held(self, slot: int) -> list[list[Tensor]]:
        """Returns views of the contents of a slot.

        Views are made when a slot is first copied: making those of all slots at once would delay the rows.
        """
        held = self._views.get(slot)
        if held is None:
            held = self._views[slot] = [[buffer[slot] for buffer in kind] for kind in self._kinds]
        return held


def _flat(buffers: Sequence[tuple[Tensor, int]]) -> list[list[Tensor]]:
    """Returns all buffers as views [slots, n], grouped by dtype: int64 if the size allows, else int16 or bytes.

    CUDA copies contiguous tensors of one dtype together, and larger elements faster.
    """
    flat: list[Tensor] = []
    for buffer, dimension in buffers:
        stored = buffer if buffer.is_contiguous() else buffer.mT
        if dimension == 0:
            flat.append(stored.view(stored.shape[0], -1))
        else:
            flat += stored.view(*stored.shape[:2], -1).unbind()
    kinds: dict[torch.dtype, list[Tensor]] = {torch.int64: [], torch.int16: [], torch.uint8: []}
    for each in flat:
        size = each.shape[-1] * each.element_size()
        dtype = torch.int64 if size % 8 == 0 else torch.int16 if size % 2 == 0 else torch.uint8
        kinds[dtype].append(each.view(dtype))
    return [views for views in kinds.values() if views]


def spec_of(buffer: Tensor) -> Spec:
    """Returns dtype, shape and strides of a tensor."""
    return str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape), buffer.stride()
