"""Compares compiled results with eager ones, within what rounding at their precision allows."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from snapcap.models.layers.weights import RegionFunction

# ‖a − b‖ / ‖b‖ of one region. Reordered sums differ by a few ulp; a wrong input layout differs by about 1. With
# weights of int8, compiled products round their inputs to 8 bits and eager ones do not.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.int8: 3e-2}
_PART_NUMBERS = 1 << 22  # in fp64 and three times, 100 MB


class CheckError(RuntimeError):
    """A compiled result that is not the eager one."""


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in fp64; infinite where either is not finite.

    Tokens that nothing may choose, whose score is −∞ in both, count as equal.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"cannot compare {list(actual.shape)} with {list(expected.shape)}")
    apart = norm = 0.0
    for a, b in _parts(actual, expected):
        banned = (a == -torch.inf) & (b == -torch.inf)
        ours, theirs = (each.to(torch.float64, copy=True).masked_fill_(banned, 0) for each in (a, b))
        apart += float((ours - theirs).square_().sum())
        norm += float(theirs.square_().sum())
    if not (math.isfinite(apart) and math.isfinite(norm)):
        return math.inf
    return math.sqrt(apart / norm) if norm > 0 else math.sqrt(apart)


def _parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors in pieces of few rows: in fp64 a whole cache would take several times its memory."""
    if a.numel() <= _PART_NUMBERS or a.dim() == 0:
        yield a, b
    elif len(a) == 1:
        yield from _parts(a[0], b[0])
    else:
        half = len(a) // 2
        yield from _parts(a[:half], b[:half])
        yield from _parts(a[half:], b[half:])


def compare_call(
    expected: RegionFunction, actual: RegionFunction, inputs: Sequence[Tensor], dtype: torch.dtype
) -> float:
    """Call both on the same inputs; compare the results and everything they wrote in place. The inputs are changed
    as ``actual`` changes them: a third copy of large caches would not fit beside the others.

    Integers (tokens, positions, slots) must be equal, but for a token whose logit is as good as the eager one's.
    The result must be contiguous: the next region's code is compiled for that.

    Returns:
        The largest relative difference.

    Raises:
        CheckError: a difference is larger than the dtype explains, or the result has gaps.
    """
    theirs = [t.clone() for t in inputs]
    reference, result = expected(*theirs), actual(*inputs)
    if not result.is_contiguous():
        raise CheckError(f"output {list(result.shape)} is not contiguous: its strides are {list(result.stride())}")
    pairs = [("output", result, reference)]
    pairs += [(f"input {i}", a, b) for i, (a, b) in enumerate(zip(inputs, theirs, strict=True))]
    worst = 0.0
    for name, ours_, theirs_ in pairs:
        if theirs_.is_floating_point():
            difference = relative_difference(ours_, theirs_)
            worst = max(worst, difference)
            if difference > TOLERANCE[dtype]:
                raise CheckError(f"{name} differs by {difference:.1e}, more than {TOLERANCE[dtype]:.0e}")
        elif not torch.equal(ours_, theirs_) and not _ties(reference, ours_, theirs_, dtype):
            raise CheckError(f"{name} differs in {int((ours_ != theirs_).sum())} of {theirs_.numel()} numbers")
    return worst


def _ties(logits: Tensor, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether every differing token has a logit within rounding of the eager choice's."""
    if logits.dim() != 2 or ours.shape != logits.shape[:1]:
        return False
    rows = torch.nonzero(ours != theirs).flatten()
    chosen = logits[rows, ours[rows]].double()
    best = logits[rows, theirs[rows]].double()
    return bool(((best - chosen).abs() <= TOLERANCE[dtype] * best.abs().clamp(min=1.0)).all())
