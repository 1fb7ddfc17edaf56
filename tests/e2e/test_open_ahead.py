"""Packages that are opened, and run, before and beside the import of torch. On a CPU, where no server does so: the
C interface is the same, and what only a GPU can show is in tests/gpu."""

import json
import logging
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.servers.server_process import python

from snapcap.warmup.plan.artifacts import Artifacts
from snapcap.warmup.runtime.aoti.container import AotiError, Container
from snapcap.warmup.runtime.aoti.packages import InputSpecs
from snapcap.warmup.start.ahead import open_ahead
from snapcap.warmup.store.blobs import VerifiedFile
from snapcap.warmup.store.fetch import Fetched

INSIDE = "package/data/aotinductor/model"
PROGRAM = """
import json, sys, threading
from pathlib import Path
from snapcap.warmup.start.ahead import open_ahead
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.plan import make_plan
from snapcap.warmup.start.preparation import find_artifacts, read_checkpoint

cache, beside = Path(sys.argv[1]), sys.argv[2] == "beside"
options = StartOptions(ModelOptions(cache_dir=cache), ComputeOptions("cpu", buckets=(1, 4)))
checkpoint = read_checkpoint(options)
plan = make_plan(checkpoint.config, options)
found = find_artifacts(checkpoint.config, plan, options, "aot")
importing = threading.Thread(target=__import__, args=("torch",))
if beside:
    importing.start()
opened = open_ahead(found, "cpu", (1, 4))
modules = sorted({"torch", "PIL._imaging"} & set(sys.modules))
if beside:
    importing.join()

from snapcap.warmup.runtime.aoti.torch_packages import torch_backend
from snapcap.warmup.build.check_worker import example_inputs
from snapcap.warmup.runtime.compare import compare_call
from snapcap.warmup.runtime.devices.torch_settings import open_device
from snapcap.warmup.runtime.loaded_model import load_model
from snapcap.warmup.plan.buckets import Bucket

device, dtype = open_device(plan)
model = load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, device, dtype)
backend = torch_backend(dict.fromkeys(opened, "nowhere"), found.input_specs, model, opened)
worst = {}
for region in model.regions:
    for bucket in (Bucket(1), Bucket(4)):
        if not region.on_demand:
            run = backend.callable(region, bucket)
            inputs = example_inputs(model, region, bucket, padding=False)
            worst[f"{region.name} {bucket.size}"] = compare_call(region.function, run, inputs, dtype)
print(json.dumps([sorted(opened), modules, worst]))
"""


@pytest.mark.parametrize("when", ["before", "beside"])
def test_packages_run_without_torchs_module_and_then_with_its_tensors(
    when: str, built_cache: Path, tmp_path: Path
) -> None:
    run = python("-c", PROGRAM, str(built_cache), when, TMPDIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    opened, modules, worst = json.loads(run.stdout)
    regions = (
        "decoder_after",
        "decoder_before",
        "decoder_block",
        "encoder_after",
        "encoder_before",
        "encoder_block",
    )
    assert opened == [f"aot/{region}.b{size}.pt2" for region in regions for size in (1, 4)]
    if when == "before":
        assert "torch" not in modules
    assert len(worst) == len(opened)
    assert max(worst.values()) < 1e-4
    assert list(tmp_path.iterdir()) == []


def built(cache: Path) -> tuple[dict[str, Path], dict[str, InputSpecs]]:
    """The packages and specs of a build, by entry name."""
    (folder,) = (cache / "store" / "builds").iterdir()
    files = {f"aot/{path.name}": path for path in sorted((folder / "aot").glob("*.pt2"))}
    records = {entry: json.loads(path.with_suffix(".json").read_text()) for entry, path in files.items()}
    return files, {entry: record["signature"] for entry, record in records.items()}


def artifacts(files: Mapping[str, Path], specs: Mapping[str, Any]) -> Artifacts:
    entries = {entry: VerifiedFile.of(path) for entry, path in files.items()}
    return Artifacts("key", {}, cast(Fetched, SimpleNamespace(entries=entries)), specs)


def test_only_the_sizes_that_are_asked_for_are_opened(built_cache: Path) -> None:
    opened = open_ahead(artifacts(*built(built_cache)), "cpu", (4,))
    assert len(opened) == 6
    assert all(".b4." in entry for entry in opened)


@pytest.mark.parametrize("damage", ["file", "inputs", "dtype", "shape"])
def test_what_cannot_be_opened_is_left_to_the_usual_way(
    damage: str, built_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, specs = built(built_cache)
    entry = "aot/decoder_before.b1.pt2"
    if damage == "file":
        files[entry] = tmp_path / "cut.pt2"
        files[entry].write_bytes(b"no package")
    elif damage == "inputs":
        del specs[entry]
    elif damage == "dtype":
        specs[entry] = [["float3", [1], [1]]]
    else:
        specs[entry] = [["float32", [1 << 60], [1]]]
    with caplog.at_level(logging.WARNING, "snapcap.start"):
        opened = open_ahead(artifacts(files, specs), "cpu", (1,))
    assert list(opened) == ["aot/decoder_after.b1.pt2"], "those before it"
    assert [record.message for record in caplog.records] == ["packages not opened ahead"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "holds 0 libraries"),
        (["a.wrapper.so", "b.wrapper.so"], "holds 2 libraries"),
        (["a.wrapper.so", "a.wrapper.json"], "calls operators of Python's dispatcher"),
        (["a.wrapper.so"], "file too short"),
    ],
)
def test_a_package_that_needs_more_is_refused(members: list[str], message: str, tmp_path: Path) -> None:
    package = tmp_path / "a.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        for name in members:
            archive.writestr(f"{INSIDE}/{name}", b"")
    with pytest.raises(AotiError, match=message):
        Container.open(VerifiedFile.of(package), "cpu")


def test_a_package_whose_library_does_not_unpack_is_refused(tmp_path: Path) -> None:
    package, content = tmp_path / "a.pt2", bytes(range(256)) * 64
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{INSIDE}/a.wrapper.so", content)
    packed = zlib.compress(content, wbits=-15)
    data = package.read_bytes()
    assert packed in data
    package.write_bytes(data.replace(packed, b"\xff" * len(packed)))
    with pytest.raises(AotiError, match="while decompressing data"):
        Container.open(VerifiedFile.of(package), "cpu")


def test_a_model_on_a_device_that_is_not_there_cannot_be_made(built_cache: Path) -> None:
    files, _ = built(built_cache)
    with pytest.raises(AotiError, match="cannot be made on no-such-device"):
        Container.open(VerifiedFile.of(files["aot/decoder_before.b1.pt2"]), "no-such-device")
