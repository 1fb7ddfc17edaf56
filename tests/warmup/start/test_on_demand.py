"""A package that is opened by its first call: the region of beams, which no start waits for."""

import logging
import zipfile
from pathlib import Path

import pytest
import torch

from snapcap.warmup.build.check_worker import example_inputs
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.runtime.aoti.packages import entry_name, input_specs
from snapcap.warmup.runtime.backends.aot import AotBackend
from snapcap.warmup.runtime.compare import compare_call
from snapcap.warmup.runtime.loaded_model import LoadedModel
from snapcap.warmup.store.blobs import VerifiedFile

FOUR = Bucket(4)
ENTRY = entry_name("decoder_beams", 4)


@pytest.mark.parametrize("damage", ["not a package", "of other inputs", "gone", "changed", "not in the set"])
def test_what_cannot_be_opened_stays_eager_and_says_so_once(
    damage: str, demo_model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = demo_model.regions.decoder_beams
    path = tmp_path / "package.pt2"
    path.write_bytes(b"no package")
    package = VerifiedFile.of(path)
    if damage == "gone":
        path.unlink()
    if damage == "changed":
        path.write_bytes(b"other code")
    built_for = input_specs(demo_model.inputs(region, FOUR))
    specs = {ENTRY: built_for[:-1] if damage == "of other inputs" else built_for}
    entries = {} if damage == "not in the set" else {ENTRY: package}
    run = AotBackend(entries, specs, demo_model).callable(region, FOUR)
    assert caplog.records == []
    inputs = example_inputs(demo_model, region, FOUR, padding=False)
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
    region, path = demo_model.regions.decoder_beams, tmp_path / "package.pt2"
    path.write_bytes((build / ENTRY).read_bytes())
    package, specs = VerifiedFile.of(path), {ENTRY: input_specs(demo_model.inputs(region, FOUR))}
    opened = AotBackend({ENTRY: package}, specs, demo_model).callable(region, FOUR)
    late = AotBackend({ENTRY: package}, specs, demo_model).callable(region, FOUR)
    inputs = example_inputs(demo_model, region, FOUR, padding=False)
    with torch.no_grad():
        assert compare_call(region.function, opened, inputs, demo_model.dtype) < 1e-4
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("more", b"")
        assert compare_call(region.function, opened, inputs, demo_model.dtype) < 1e-4
        assert caplog.records == []
        assert compare_call(region.function, late, inputs, demo_model.dtype) == 0.0, "the package was run"
    (record,) = caplog.records
    assert "has changed since it was verified" in record.fields["error"]  # type: ignore[attr-defined]
