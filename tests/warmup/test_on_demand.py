"""A package that is opened by its first call: the region of beams, which no start waits for."""

import logging
from pathlib import Path

import pytest
import torch

from warmup.backends.aot import AotBackend
from warmup.buckets import Bucket
from warmup.check_worker import example_inputs
from warmup.compare import compare_call
from warmup.model import LoadedModel
from warmup.packages import entry_name, signature

FOUR = Bucket(4)
ENTRY = entry_name("decoder_beams", 4)


@pytest.mark.parametrize("damage", ["not a package", "of other inputs", "gone", "not in the set"])
def test_what_cannot_be_opened_stays_eager_and_says_so_once(
    damage: str, demo_model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = demo_model.regions.decoder_beams
    path = tmp_path / "package.pt2"
    if damage != "gone":
        path.write_bytes(b"no package")
    built_for = signature(demo_model.inputs(region, FOUR))
    signatures = {ENTRY: built_for[:-1] if damage == "of other inputs" else built_for}
    entries = {} if damage == "not in the set" else {ENTRY: path}
    run = AotBackend(entries, signatures, demo_model).callable(region, FOUR)
    assert caplog.records == []
    inputs = example_inputs(demo_model, region, FOUR, padding=False)
    with caplog.at_level(logging.ERROR), torch.no_grad():
        assert [compare_call(region.function, run, inputs, demo_model.dtype) for _ in range(2)] == [0.0, 0.0]
    (record,) = caplog.records
    assert record.fields["package"] == ENTRY  # type: ignore[attr-defined]
