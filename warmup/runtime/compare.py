"""Compares compiled results with eager results, within the rounding of their dtype."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from snapcap.models.layers.weights import RegionFunction

# ‖a − b‖ / ‖b‖ of one region. Reordered sums differ by a few ulp; a wrong input layout differs by about 1. With
# weights of int8, compiled products round their inputs to 8 bits and eager ones do not.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.int8: 3e-2}
_PART_NUMBERS = 1 << 22  # numbers compared at a time: three copies in fp64 take 100 MB


class CheckError(RuntimeError):
    """Says that a compiled result differs from the eager result."""


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Returns ‖actual − expected‖ / ‖expected‖ in fp64; infinite if either tensor has numbers that are not finite.

    Scores of −∞ in both tensors, of tokens that must not be chosen, count as equal."""
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
    """Yields both tensors in parts of a few rows: a whole cache in fp64 would take several times its memory."""
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
    """Call both functions on the same inputs, and compare the results and all tensors that they write in place. The
    inputs end as ``actual`` changes them: a third copy of large caches would not fit into memory.

    Integers (tokens, positions, slots) must be equal, except for tokens whose logits are equal up to rounding. The
    result must be contiguous, because the next region is compiled for contiguous inputs.

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
