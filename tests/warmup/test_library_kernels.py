"""What a thread does beside the opening of packages: one encoder layer a bucket, whose failure ends nothing."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warmup.buckets import Bucket
from warmup.library_kernels import loading_library_kernels, run_encoder_blocks
from warmup.model import LoadedModel, load_model
from warmup.options import StartOptions, StoreOptions
from warmup.plan import make_plan
from warmup.prepare import read_checkpoint

BUCKETS = (Bucket(1), Bucket(2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    options = StartOptions("demo", folder, StoreOptions(folder), device="cpu", buckets=(1, 2))
    checkpoint = read_checkpoint(options)
    plan = make_plan(checkpoint.config, options)
    cpu = torch.device("cpu")
    return load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, cpu, torch.float32)


def with_block(model: LoadedModel, function: Callable[..., Any]) -> LoadedModel:
    block = replace(model.regions.encoder_block, function=function)
    return replace(model, regions=replace(model.regions, encoder_block=block))


def test_one_layer_runs_at_every_bucket(model: LoadedModel) -> None:
    rows: list[tuple[int, bool]] = []
    original = model.regions.encoder_block.function

    def block(hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = original(hidden, *weights)
        rows.append((result.shape[0], torch.is_grad_enabled()))
        return result

    run_encoder_blocks(with_block(model, block), BUCKETS)
    assert rows == [(2, False), (1, False)]


def test_a_failure_is_a_line_in_the_log(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    def block(*_inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    with caplog.at_level(logging.WARNING, "snapcap.start"):
        run_encoder_blocks(with_block(model, block), BUCKETS)
    assert [record.fields for record in caplog.records] == [{"error": "no kernel image"}]  # type: ignore[attr-defined]


def test_a_cpu_has_nothing_to_load(model: LoadedModel) -> None:
    def block(*_inputs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the packages are all that runs")

    with loading_library_kernels(with_block(model, block), BUCKETS):
        pass
