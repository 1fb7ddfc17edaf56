"""Prepared weights in the artifact folder: written once, found by a start, replaced when they are damaged."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints.prepared_case import Case, case_of, prepared_files, rewrite

from snapcap.models.config import ModelConfig
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.runtime.torch_model import load_model
from snapcap.warmup.weights import find
from snapcap.warmup.weights.find import content_digest, layout_digest
from snapcap.warmup.weights.prepare import Prepared

CPU = torch.device("cpu")


def exchange(folder: Path, first: Path, second: Path, prepare: Callable[[], Prepared]) -> list[Prepared]:
    """Prepare a checkpoint with that of ``second`` in its place, and with its own."""
    folder.rename(first)
    second.rename(folder)
    other = prepare()
    folder.rename(second)
    first.rename(folder)
    return [other, prepare()]


def test_a_start_finds_what_was_written_after_the_one_before(case: Case) -> None:
    assert case.find().result == "miss"
    assert not case.options.store_folder.exists(), "looking makes nothing"
    assert case.prepare().result == "written"
    assert case.is_clean()
    assert case.file().stat().st_mode & 0o777 == 0o600
    found = case.find()
    assert found.mapped is not None
    assert (found.result, found.mapped.header.key) == ("hit", case.file().name)
    assert case.file().name not in found.reason, "a line of the log"
    checkpoint, plan = case.checkpoint, case.plan
    given = (checkpoint.folder, checkpoint.config, checkpoint.transform, plan, CPU, torch.float32)
    ours, theirs = load_model(*given, found.mapped), load_model(*given)
    assert (ours.prepared, theirs.prepared) == (True, False)
    for region, layers in theirs.weights.sets.items():
        for one, other in zip(ours.weights.sets[region], layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert case.prepare().result == "kept"


@pytest.mark.parametrize("wrong", ["a layer less", "a layer of other shapes"])
def test_what_does_not_fit_the_configuration_is_read_from_the_checkpoint(
    wrong: str, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.prepare()
    mapped = case.find().mapped
    assert mapped is not None
    first, *others = mapped.header.regions["decoder_block"]
    blocks = (*others,) if wrong == "a layer less" else (first[::-1], *others)
    regions = {**mapped.header.regions, "decoder_block": blocks}
    odd = replace(mapped, header=replace(mapped.header, regions=regions))
    given = (
        case.checkpoint.folder,
        case.checkpoint.config,
        case.checkpoint.transform,
        case.plan,
        CPU,
        torch.float32,
    )
    model = load_model(*given, odd)
    assert not model.prepared
    assert len(model.weights.sets["decoder_block"]) == case.checkpoint.config.decoder.num_layers
    assert "the checkpoint is read" in caplog.text


def test_what_cannot_be_looked_for_is_a_miss(case: Case, folder: Path) -> None:
    case.prepare()
    transform = case.checkpoint.transform
    transform = replace(transform, normalisation=transform.normalisation._replace(mean=(float("nan"),) * 3))
    odd = case._replace(checkpoint=replace(case.checkpoint, transform=transform))
    assert odd.find().result == "miss"
    (folder / "model.safetensors").unlink()
    assert case.find().result == "miss", "what is wrong with it is for loading to say"


@pytest.mark.parametrize(("device", "dtype"), [("cuda:0", "bfloat16"), ("cpu", "bfloat16"), ("cuda:1", "float32")])
def test_each_kind_of_device_and_dtype_has_its_own(case: Case, device: str, dtype: str) -> None:
    case.prepare()
    assert case.find(device=device, dtype=dtype).result == "miss"
    assert case.prepare(device=device, dtype=dtype).result == "written"
    found = case.find(device=device, dtype=dtype)
    assert found.mapped is not None
    name = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    assert {tensor.dtype for tensor in found.mapped.header.tensors.values()} == {name, "F32"}
    turned = found.mapped.header.tensors["decoder_block.0.2"]
    assert (turned.strides[0] == 1) is device.startswith("cuda")
    assert case.find().result == "hit", "neither takes the other's place"


def test_a_changed_checkpoint_is_a_miss_of_the_weights_alone(case: Case, folder: Path) -> None:
    case.prepare()
    before, key = case.file(), artifact_key(case.plan.factors(case.checkpoint.config, "aot"))
    time.sleep(0.02)
    rewrite(folder)
    assert case.find().result == "miss"
    assert artifact_key(case.plan.factors(ModelConfig.from_folder(folder), "aot")) == key
    assert case.prepare().result == "written"
    assert len(prepared_files(case) - {before}) == 1
    assert case.find().result == "hit"


def test_a_touched_checkpoint_is_read_once_and_written_not_at_all(case: Case, folder: Path) -> None:
    case.prepare()
    before = case.file().stat()
    time.sleep(0.02)
    (folder / "model.safetensors").touch()
    assert case.find().result == "hit", "its content is that of prepared weights"
    assert case.prepare().result == "kept"
    assert case.find().result == "hit"
    assert case.file().stat().st_ino == before.st_ino


def test_files_that_no_record_knows_are_read_once(
    case: Case, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a container image, which are others on every machine."""
    case.prepare()
    other = case_of(shutil.copytree(folder, tmp_path / "copy"), case.options.model.cache_dir)
    read: list[Path] = []

    def counted(folder: Path) -> str:
        read.append(folder)
        return content_digest(folder)

    monkeypatch.setattr(find, "content_digest", counted)
    monkeypatch.setattr(find, "is_at_rest", lambda *_: True)
    assert [other.find().result for _ in range(3)] == ["hit"] * 3
    assert read == [other.checkpoint.folder]
    changed = case_of(shutil.copytree(folder, tmp_path / "changed"), case.options.model.cache_dir)
    rewrite(changed.checkpoint.folder)
    assert [changed.find().result for _ in range(3)] == ["miss"] * 3
    assert len(read) == 2, "files of another content are read once as well"
    empty = case_of(other.checkpoint.folder, tmp_path / "empty")
    assert empty.find().result == "miss"
    assert len(read) == 2, "where nothing is prepared nothing is read"


def test_a_checkpoint_that_changes_while_it_is_looked_for_is_a_miss(
    case: Case, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.prepare()
    other = case_of(shutil.copytree(folder, tmp_path / "copy"), case.options.model.cache_dir)

    def changing(folder: Path) -> str:
        digest = content_digest(folder)
        time.sleep(0.02)
        rewrite(folder)
        return digest

    monkeypatch.setattr(find, "content_digest", changing)
    assert other.find().result == "miss"


def test_a_copy_of_a_checkpoint_shares_its_weights(case: Case, folder: Path, tmp_path: Path) -> None:
    case.prepare()
    other = case_of(shutil.copytree(folder, tmp_path / "copy"), case.options.model.cache_dir)
    assert other.find().result == "hit"
    assert other.prepare().result == "kept"
    assert other.file() == case.file()
    time.sleep(0.02)
    rewrite(folder)
    assert case.prepare().result == "written"
    assert other.find().result == "hit"
    assert len(prepared_files(case)) == 2


def test_the_configuration_and_the_sources_are_part_of_the_layout(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, transform = case.checkpoint.config, case.checkpoint.transform
    first = layout_digest(config, transform)
    other = replace(transform, normalisation=transform.normalisation._replace(mean=(0.1, 0.2, 0.3)))
    assert layout_digest(config, other) != first
    assert layout_digest(replace(config, projected=not config.projected), transform) != first
    models = Path(__file__).parents[3] / "models"
    copy = shutil.copytree(models, tmp_path / "models", ignore=shutil.ignore_patterns("demo", "__pycache__"))
    monkeypatch.setattr("snapcap.warmup.weights.find.package_folder", lambda _: copy)
    assert layout_digest(config, transform) == first
    for name in ("layers/gpt2.py", "families/parts/vit.py", "dimensions.py", "config.py"):
        before = layout_digest(config, transform)
        source = (copy / name).read_text()
        (copy / name).write_text(source + "# a comment\n")
        assert layout_digest(config, transform) == before
        (copy / name).write_text(source + "another_order = True\n")
        assert layout_digest(config, transform) != before
    (copy / "names.py").unlink()
    with pytest.raises(FileNotFoundError, match="without its sources"):
        layout_digest(config, transform)


def test_two_layouts_of_one_checkpoint_are_kept_beside_each_other(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.prepare()
    with monkeypatch.context() as patched:
        patched.setattr("snapcap.warmup.weights.find.layout_digest", lambda *_: "1" * 64)
        assert case.find().result == "miss"
        assert case.prepare().result == "written"
        assert case.find().result == "hit"
    assert case.find().result == "hit", "as of two versions of snapcap that share a folder"


def test_two_checkpoints_at_one_place_are_kept_beside_each_other(case: Case, folder: Path, tmp_path: Path) -> None:
    """As where containers share an artifact folder, and have their checkpoints at the same path."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(folder, second)
    rewrite(second)
    exchange(folder, first, second, case.prepare)
    files = prepared_files(case)
    assert len(files) == 2
    results = [each.result for each in exchange(folder, first, second, case.prepare)]
    assert (results, prepared_files(case)) == (["kept", "kept"], files)


def test_only_the_newest_files_are_kept(case: Case) -> None:
    case.weights.mkdir(parents=True, mode=0o700)
    names = [f"{number:064}.cpu.float32.{'1' * 64}.safetensors" for number in range(12)]
    for age, name in enumerate(names):
        (case.weights / name).write_bytes(b"written by another version")
        os.utime(case.weights / name, (10**9 - age, 10**9 - age))
    case.prepare()
    own = case.find().mapped
    assert own is not None
    assert {each.name for each in prepared_files(case)} == {*names[:7], own.header.key}
    assert len(list(case.weights.glob("*.json"))) == 1
    old = case.weights / own.header.key
    os.utime(old, (1, 1))
    case.find()
    assert old.stat().st_mtime > 10**9, "what a start uses is new again"


def test_a_server_of_many_models_keeps_the_file_of_each(case: Case) -> None:
    """A ninth model would otherwise remove the file of the first, which then needs torch for each wake."""
    case.weights.mkdir(parents=True, mode=0o700)
    recent = time.time() - 86_400
    names = [f"{number:064}.cpu.float32.{'1' * 64}.safetensors" for number in range(12)]
    older_layouts = [f"{number:064}.cpu.float32.{'2' * 64}.safetensors" for number in range(12)]
    for age, name in enumerate((*names, *older_layouts)):
        (case.weights / name).write_bytes(b"of another model")
        os.utime(case.weights / name, (recent - age, recent - age))
    case.prepare()
    own = case.find().mapped
    assert own is not None
    assert {each.name for each in prepared_files(case)} == {*names, own.header.key}


def test_a_new_file_stays_where_the_clock_was_set_back(case: Case) -> None:
    case.weights.mkdir(parents=True, mode=0o700)
    tomorrow = time.time() + 86_400
    for number in range(8):
        other = case.weights / f"{number:064}.cpu.float32.{'1' * 64}.safetensors"
        other.write_bytes(b"written before")
        os.utime(other, (tomorrow, tomorrow))
    assert case.prepare().result == "written"
    assert case.find().result == "hit"


def test_what_has_another_name_than_ours_stays(case: Case, tmp_path: Path) -> None:
    strays = ["model.safetensors", f"{'0' * 64}.cpu.float32.safetensors", f"{'0' * 64}.json.bak", "lock"]
    case.weights.mkdir(parents=True, mode=0o700)
    for name in strays:
        (case.weights / name).write_bytes(b"mine")
    link, target = case.weights / f"{'0' * 64}.cpu.float32.{'1' * 64}.safetensors", tmp_path / "target"
    target.write_bytes(b"mine")
    link.symlink_to(target)
    assert case.prepare().result == "written"
    assert all((case.weights / name).read_bytes() == b"mine" for name in strays)
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("text", ["[]", '{"files": [{"path": 3}]}', "[" * 9999, None])
def test_no_record_of_others_changes_what_comes_of_it(case: Case, folder: Path, text: str | None) -> None:
    """``None``: one that others may write to."""
    case.prepare()
    stray = case.weights / f"{'0' * 64}.json"
    (record,) = case.weights.glob("*.json")
    stray.write_text(record.read_text() if text is None else text)
    stray.chmod(0o666 if text is None else 0o600)
    time.sleep(0.02)
    rewrite(folder)
    assert case.prepare().result == "written"
    assert stray.exists()
    assert case.find().result == "hit"
