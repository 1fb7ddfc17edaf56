"""Packages that are opened by their first call: those of regions that no start waits for."""

import logging
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.parity.beams import search

from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.build.builder import BuildFolder
from snapcap.warmup.build.check_worker import example_inputs
from snapcap.warmup.plan.plan import Bucket, BucketTable
from snapcap.warmup.runtime.aoti.packages import entry_name
from snapcap.warmup.runtime.aoti.torch_packages import torch_backend
from snapcap.warmup.runtime.compare import compare_call
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner, open_callables
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest
from snapcap.warmup.runtime.torch_model import LoadedModel, torch_device

FOUR = Bucket(4)
ENTRY = entry_name("decoder_beams", 4)


@pytest.mark.parametrize("damage", ["not a package", "of other inputs", "gone", "changed", "not in the set"])
def test_what_cannot_be_opened_stays_eager_and_says_so_once(
    damage: str, demo_model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = demo_model.regions["decoder_beams"]
    path = tmp_path / "package.pt2"
    path.write_bytes(b"no package")
    package = VerifiedFile.of(path)
    if damage == "gone":
        path.unlink()
    if damage == "changed":
        path.write_bytes(b"other code")
    built_for = demo_model.input_specs(region, FOUR)
    specs = {ENTRY: built_for[:-1] if damage == "of other inputs" else built_for}
    entries = {} if damage == "not in the set" else {ENTRY: package}
    run = torch_backend(entries, specs, demo_model).callable(region, FOUR)
    assert caplog.records == []
    inputs = example_inputs(demo_model, (), region, FOUR, False, demo_model.device)
    with caplog.at_level(logging.ERROR), torch.no_grad():
        assert [compare_call(region.function, run, inputs, demo_model.dtype) for _ in range(2)] == [0.0, 0.0]
    (record,) = caplog.records
    assert record.fields["package"] == ENTRY  # type: ignore[attr-defined]
    assert ("has changed since it was verified" in record.fields["error"]) == (damage == "changed")


def test_a_package_is_opened_from_the_bytes_that_were_verified(
    built_cache: Path, demo_model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hours lie between the check of the set and the first beam search: here somebody puts another package, which
    could be opened and run as well, in the place of this one, as an update of a shared cache might."""
    (build,) = (built_cache / "store" / "builds").iterdir()
    region, path = demo_model.regions["decoder_beams"], tmp_path / "package.pt2"
    path.write_bytes((build / ENTRY).read_bytes())
    package, specs = VerifiedFile.of(path), {ENTRY: demo_model.input_specs(region, FOUR)}
    opened = torch_backend({ENTRY: package}, specs, demo_model).callable(region, FOUR)
    late = torch_backend({ENTRY: package}, specs, demo_model).callable(region, FOUR)
    inputs = example_inputs(demo_model, (), region, FOUR, False, demo_model.device)
    with torch.no_grad():
        assert compare_call(region.function, opened, inputs, demo_model.dtype) < 1e-4
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("more", b"")
        assert compare_call(region.function, opened, inputs, demo_model.dtype) < 1e-4
        assert caplog.records == []
        assert compare_call(region.function, late, inputs, demo_model.dtype) == 0.0, "the package was run"
    (record,) = caplog.records
    assert "has changed since it was verified" in record.fields["error"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "asked",
    [
        [SamplingParams(temperature=1.2)],
        [SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams(), SamplingParams(temperature=2.0)],
        [SamplingParams(repetition_penalty=1.5)],
        [SamplingParams(no_repeat_ngram_size=2), SamplingParams(temperature=1.0, repetition_penalty=1.3)],
        [SamplingParams(num_beams=3, repetition_penalty=1.2, no_repeat_ngram_size=2), SamplingParams()],
        [SamplingParams(num_beams=2), SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=2.0)],
    ],
    ids=["sampled", "sampled beside greedy", "penalised", "both", "penalised beams", "everything"],
)
def test_compiled_choices_are_those_of_eager_regions(
    asked: list[SamplingParams], built_cache: Path, demo_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (built_cache / "store" / "builds").iterdir()
    bucket, luck = Bucket(1 if len(asked) == 1 else 4), random.Random(5)
    names = [entry_name(region.name, bucket.size) for region in demo_model.regions]
    recorded = {name: kept for name in names if (kept := BuildFolder(path).recorded(name)) is not None}
    assert recorded.keys() == set(names)
    compiled = torch_backend(
        {name: package for name, (package, _, _) in recorded.items()},
        {name: specs for name, (_, specs, _) in recorded.items()},
        demo_model,
    )
    length, drawn = demo_model.state.cache_length, np.random.default_rng(3)
    images = [drawn.integers(0, 256, (*demo_model.config.vision.image_size, 3), dtype=np.uint8) for _ in asked]
    rows = [SlotRequest((), each, [luck.random() for _ in range(length)], 12) for each in asked]
    tokens = []
    for backend in (compiled, EagerBackend()):
        runner = Runner(demo_model, torch_device(demo_model.device)).twin()
        for component in ("encoder", "decoder"):
            runner.bind(component, bucket, open_callables(runner.regions, component, bucket, backend))
        tokens.append(search(runner, BucketTable.of([bucket.size]), list(zip(images, rows, strict=True)), 12))
    assert tokens[0] == tokens[1]
    assert caplog.records == [], "a package stayed eager"
