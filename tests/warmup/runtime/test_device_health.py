"""What an error says of the device that had it. A lost one needs a GPU: tests/gpu."""

import pytest
import torch

from snapcap.warmup.runtime.device import device_health


class Lost:
    """A buffer of a device whose every call fails."""

    is_cuda = False

    def __getitem__(self, _: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("error", "health"),
    [
        (RuntimeError("expected two tensors"), "failed"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
    ],
    ids=["failed", "allocator", "driver"],
)
def test_a_device_that_answers_is_not_lost(error: Exception, health: str) -> None:
    assert device_health(torch.zeros(4, dtype=torch.int64), error) == health


def test_one_that_does_not_is_lost_whatever_the_error_was() -> None:
    for error in (RuntimeError("x"), torch.OutOfMemoryError("x")):
        assert device_health(Lost(), error) == "lost"  # type: ignore[arg-type]
