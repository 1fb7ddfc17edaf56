"""Where images wait on the host for their copy to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from warmup.readback import event

Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


class Staging:
    """Images and slots of a batch; pinned for CUDA, so that their copies need no host thread."""

    def __init__(self, pixels: Tensor, slots: Tensor) -> None:
        self._cuda = pixels.is_cuda
        self._pixels = torch.zeros_like(pixels, device="cpu", pin_memory=self._cuda)
        self._slots = torch.zeros_like(slots, device="cpu", pin_memory=self._cuda)
        self._targets = (pixels, slots)
        self._copied = event() if self._cuda else None

    def copy(self, images: Sequence[Pixels], slots: list[int]) -> None:
        """Hand over a batch; waits for the copy of the last one, which the device has long made."""
        if self._copied is not None:
            self._copied.synchronize()
        pixels, target_slots = self._targets
        np.stack(images, out=self._pixels[: len(images)].numpy())
        self._slots.copy_(torch.tensor(slots))
        pixels[: len(images)].copy_(self._pixels[: len(images)], non_blocking=True)
        target_slots.copy_(self._slots, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
