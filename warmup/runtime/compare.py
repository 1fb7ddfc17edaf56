"""Compares compiled results with eager ones, within what rounding at their precision allows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from snapcap.models.regions.functions import RegionFunction

# ‖a − b‖ / ‖b‖ of one region. Reordered sums differ by a few ulp; a wrong input layout differs by about 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class CheckError(RuntimeError):
    """A compiled result that is not the eager one."""


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in fp64; infinite where either is not finite."""
    a, b = actual.double(), expected.double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    norm = b.norm()
    return float((a - b).norm() / norm) if norm > 0 else float((a - b).norm())


def compare_call(
    expected: RegionFunction, actual: RegionFunction, inputs: Sequence[Tensor], dtype: torch.dtype
) -> float:
    """Call both on copies of the same inputs; compare the results and everything they wrote in place.

    Integers (tokens, positions, slots) must be equal, but for a token whose logit is as good as the eager one's.
    The result must be contiguous: the next region's code is compiled for that.

    Returns:
        The largest relative difference.

    Raises:
        CheckError: a difference is larger than the dtype explains, or the result has gaps.
    """
    theirs, ours = [t.clone() for t in inputs], [t.clone() for t in inputs]
    reference, result = expected(*theirs), actual(*ours)
    if not result.is_contiguous():
        raise CheckError(f"output {list(result.shape)} is not contiguous: its strides are {list(result.stride())}")
    pairs = [("output", result, reference)]
    pairs += [(f"input {i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    worst = 0.0
    for name, ours_, theirs_ in pairs:
        if theirs_.is_floating_point():
            banned = (theirs_ == -torch.inf) & (ours_ == -torch.inf)  # tokens that nothing may choose
            difference = relative_difference(ours_.masked_fill(banned, 0), theirs_.masked_fill(banned, 0))
            worst = max(worst, difference)
            if difference > TOLERANCE[dtype]:
                raise CheckError(f"{name} differs by {difference:.1e}, more than {TOLERANCE[dtype]:.0e}")
        elif not torch.equal(ours_, theirs_) and not _ties(reference, ours_, theirs_, dtype):
            raise CheckError(f"{name} differs in {int((ours_ != theirs_).sum())} of {theirs_.numel()} numbers")
    return worst


def _ties(logits: Tensor, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether every differing token has a logit within rounding of the eager choice's."""
    if logits.dim() != 2 or ours.shape != logits.shape[:1]:
        return False
    rows = torch.nonzero(ours != theirs).flatten()
    chosen = logits[rows, ours[rows]].double()
    best = logits[rows, theirs[rows]].double()
    return bool(((best - chosen).abs() <= TOLERANCE[dtype] * best.abs().clamp(min=1.0)).all())
