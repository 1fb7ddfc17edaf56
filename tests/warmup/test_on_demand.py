"""A package that is opened by its first call: the region of beams, which no start waits for."""

import logging
from pathlib import Path

import pytest
import torch

from warmup.backends.aot import AotBackend
from warmup.buckets import Bucket
from warmup.check_worker import example_inputs
from warmup.compare import compare_call
from warmup.model import LoadedModel, load_model
from warmup.options import StartOptions, StoreOptions
from warmup.packages import entry_name, signature
from warmup.plan import make_plan
from warmup.prepare import read_checkpoint

FOUR = Bucket(4)
ENTRY = entry_name("decoder_beams", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("cache")
    options = StartOptions("demo", folder, StoreOptions(folder), device="cpu", buckets=(1, 4), threads=1)
    checkpoint = read_checkpoint(options)
    plan = make_plan(checkpoint.config, options)
    cpu = torch.device("cpu")
    return load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, cpu, torch.float32)


@pytest.mark.parametrize("damage", ["not a package", "of other inputs", "gone", "not in the set"])
def test_what_cannot_be_opened_stays_eager_and_says_so_once(
    damage: str, model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = model.regions.decoder_beams
    path = tmp_path / "package.pt2"
    if damage != "gone":
        path.write_bytes(b"no package")
    built_for = signature(model.inputs(region, FOUR))
    signatures = {ENTRY: built_for[:-1] if damage == "of other inputs" else built_for}
    entries = {} if damage == "not in the set" else {ENTRY: path}
    run = AotBackend(entries, signatures, model).callable(region, FOUR)
    assert caplog.records == []
    inputs = example_inputs(model, region, FOUR, padding=False)
    with caplog.at_level(logging.ERROR), torch.no_grad():
        assert [compare_call(region.function, run, inputs, model.dtype) for _ in range(2)] == [0.0, 0.0]
    (record,) = caplog.records
    assert record.fields["package"] == ENTRY  # type: ignore[attr-defined]
