"""What a thread does beside the opening of packages: one encoder layer a bucket, whose failure ends nothing."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from warmup.buckets import Bucket
from warmup.library_kernels import loading_library_kernels, run_encoder_blocks
from warmup.model import LoadedModel

BUCKETS = (Bucket(1), Bucket(2))


def with_block(model: LoadedModel, function: Callable[..., Any]) -> LoadedModel:
    block = replace(model.regions.encoder_block, function=function)
    return replace(model, regions=replace(model.regions, encoder_block=block))


def test_one_layer_runs_at_every_bucket(demo_model: LoadedModel) -> None:
    rows: list[tuple[int, bool]] = []
    original = demo_model.regions.encoder_block.function

    def block(hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = original(hidden, *weights)
        rows.append((result.shape[0], torch.is_grad_enabled()))
        return result

    run_encoder_blocks(with_block(demo_model, block), BUCKETS)
    assert rows == [(2, False), (1, False)]


def test_a_failure_is_a_line_in_the_log(demo_model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    def block(*_inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    with caplog.at_level(logging.WARNING, "snapcap.start"):
        run_encoder_blocks(with_block(demo_model, block), BUCKETS)
    assert [record.fields for record in caplog.records] == [{"error": "no kernel image"}]  # type: ignore[attr-defined]


def test_a_cpu_has_nothing_to_load(demo_model: LoadedModel) -> None:
    def block(*_inputs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the packages are all that runs")

    with loading_library_kernels(with_block(demo_model, block), BUCKETS):
        pass
