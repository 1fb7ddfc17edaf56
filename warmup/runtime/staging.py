"""Holds images for the encoder on the host, and copies them to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from snapcap.warmup.runtime.readback import event

Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


class Staging:
    """Images and slots of a batch. For CUDA they are pinned, so that their copies need no host thread."""

    def __init__(self, pixels: Tensor, slots: Tensor) -> None:
        """``pixels`` [B, height, width, 3] uint8 and ``slots`` [B] int64: what the encoder reads."""
        self._targets = (pixels, slots)
        self._host = tuple(torch.zeros_like(t, device="cpu", pin_memory=t.is_cuda) for t in self._targets)
        self._upload = _Upload(self._targets) if pixels.is_cuda else None

    def copy(self, images: Sequence[Pixels], slots: list[int]) -> None:
        """Hand over a batch; waits for the upload of the last one, which the device has long made."""
        pixels, host_slots = self._host
        if self._upload is not None:
            self._upload.wait()
        np.stack(images, out=pixels[: len(images)].numpy())
        host_slots.copy_(torch.tensor(slots))
        batch = (pixels[: len(images)], host_slots)
        if self._upload is not None:
            self._upload.start(batch)
        else:
            for target, source in zip(self._targets, batch, strict=True):
                target[: len(source)].copy_(source)


class _Upload:
    """Copies from the host on a stream of its own, so that the work before a batch goes on meanwhile:

    copies    [ batch 2 → arrival ]           [ batch 3 → arrival ]
    compute   [ encode 1, steps ][ take ][ encode 2, steps ][ take ]…
    """

    def __init__(self, targets: tuple[Tensor, ...]) -> None:
        self._targets = targets
        self._arrival = tuple(torch.empty_like(target) for target in targets)
        self._stream = torch.cuda.Stream(targets[0].device)  # type: ignore[no-untyped-call]
        self._arrived, self._taken = event(), event()

    def wait(self) -> None:
        """Until the host's buffers have been read."""
        self._arrived.synchronize()

    def start(self, batch: tuple[Tensor, ...]) -> None:
        """Give the device a batch; what is launched from now on finds it in the first rows of the targets."""
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
