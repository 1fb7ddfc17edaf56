"""bf16 and fp16 on a GPU, against transformers in fp32 on the same rounded weights.

With eps the dtype's machine epsilon (2^-7, 2^-10), these tolerances hold:

    encoder output   ‖a − b‖ ≤ 3 eps ‖b‖
    logits           |a − b| ≤ 8 eps max|b| of the row, for every step after transformers' own tokens
    tokens           another one than transformers' only where its fp32 logit is at most 4 eps max|b| below the best

Plain regions on a CPU reach 0.8, 2.8 and 1.1 eps, as transformers' own 16 bits do. The median distance of the best
two logits is 10 eps in bf16 and 80 in fp16, so a wrong token does not pass for a tie.
"""

from typing import Any

import pytest
import torch
from support.parity.device_cases import (
    BUCKETS,
    STEPS,
    Captioner,
    Direct,
    open_model,
    open_runner,
    plan_of,
    steps_with_logits,
)

from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.compare import relative_difference
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SlotRequest
from snapcap.warmup.runtime.torch_model import DTYPES

pytestmark = pytest.mark.timeout(600)  # compiling
ENCODER_EPS, LOGITS_EPS, TIE_EPS = 3.0, 8.0, 4.0
# Compiled packages of the others are made for bf16 alone: the kernels are the same, and are run by themselves.
CASES = [
    (family, dtype, backend)
    for family in ("vit-gpt2", "blip", "git", "smolvlm", "llava", "florence2", "qwen3-vl")
    for dtype in ("bfloat16", "float16")
    for backend in ("eager", "kernels", "aot")
    if family == "vit-gpt2" or (dtype, backend) != ("float16", "aot")
]


class Expected:
    """transformers' answers for 64 images, and what may be said of ours."""

    def __init__(self, captioner: Captioner, model: Any, dtype: torch.dtype) -> None:
        self.eps = torch.finfo(dtype).eps
        self.captioner = captioner
        self.images = captioner.images(64)
        self.encoded = captioner.encoded(model, self.images)
        self.tokens, logits = captioner.generate(model, self.images, STEPS, ())
        self.logits = torch.stack(logits, dim=1).float().cpu()  # [rows, steps, vocabulary]
        self.scale = self.logits.abs().amax(-1)

    def check_encoder(self, runner: Runner, bucket: Bucket) -> None:
        images = self.images[: bucket.size]
        output = self.captioner.real(runner.encode(bucket, images, 0), images)
        difference = relative_difference(output, self.encoded[: bucket.size])
        assert difference <= ENCODER_EPS * self.eps, f"bucket {bucket.size}: {difference / self.eps:.2f} eps"

    def check_forced(self, runner: Runner, bucket: Bucket) -> None:
        """Every step after transformers' own tokens, which are forced as a prompt is."""
        rows = [SlotRequest(tuple(tokens)) for tokens in self.tokens[: bucket.size]]
        tokens, logits = steps_with_logits(runner, bucket, rows, STEPS)
        assert tokens == self.tokens[: bucket.size]
        wanted, scale = self.logits[: bucket.size], self.scale[: bucket.size]
        error = ((logits - wanted).abs().amax(-1) / scale).max().item()
        assert error <= LOGITS_EPS * self.eps, f"bucket {bucket.size}: {error / self.eps:.2f} eps"
        self._ties(bucket, logits.argmax(-1))

    def check_free(self, runner: Runner, bucket: Bucket) -> None:
        """Each row's own tokens, up to the first that is another one: there both have read the same."""
        rows = [SlotRequest()] * bucket.size
        tokens, logits = steps_with_logits(runner, bucket, rows, STEPS)
        assert tokens == logits.argmax(-1).tolist(), "the head's token is the first of its best logits"
        ours = torch.tensor(tokens)
        theirs = torch.tensor(self.tokens[: bucket.size])
        same_before = (ours == theirs).long().cumprod(-1).roll(1, -1)
        same_before[:, 0] = 1
        self._ties(bucket, torch.where(same_before.bool(), ours, theirs))

    def _ties(self, bucket: Bucket, ours: torch.Tensor) -> None:
        """``ours`` [rows, steps]: where it is not transformers' token, the two logits are within rounding."""
        logits, theirs = self.logits[: bucket.size], torch.tensor(self.tokens[: bucket.size])
        gap = (logits.gather(-1, theirs[..., None]) - logits.gather(-1, ours[..., None]))[..., 0]
        worst = (gap / self.scale[: bucket.size]).max().item()
        assert worst <= TIE_EPS * self.eps, f"bucket {bucket.size}: another token, {worst / self.eps:.1f} eps worse"


@pytest.mark.parametrize(("family", "dtype", "backend"), CASES)
def test_results_are_transformers_within_rounding_in_every_bucket(
    family: str,
    dtype: str,
    backend: str,
    captioners: dict[str, Captioner],
    references: dict[tuple[str, str], Any],
    packages: Any,
    device: torch.device,
) -> None:
    captioner = captioners[family]
    plan = plan_of(device, dtype, BUCKETS[family])
    model = open_model(captioner, plan)
    if backend == "aot":
        runner = open_runner(model, plan, packages.backend(family, dtype, model))
    else:
        runner = open_runner(model, plan, EagerBackend() if backend == "eager" else Direct(model))
    expected = Expected(captioner, references[family, dtype], DTYPES[dtype])
    for bucket in plan.table.buckets:
        expected.check_encoder(runner, bucket)
        expected.check_forced(runner, bucket)
        runner.encode(bucket, expected.images[: bucket.size], 0)
        expected.check_free(runner, bucket)
