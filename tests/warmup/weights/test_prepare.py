"""Prepared weights in the artifact folder: written once, found by a start, replaced when they are damaged."""

import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapcap.models.config import ModelConfig
from snapcap.models.weights.prepared.header import CHUNK_BYTES
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.machine.files import locked_alone
from snapcap.warmup.machine.tasks import to_json
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan, make_plan
from snapcap.warmup.runtime.loaded_model import load_model
from snapcap.warmup.start.preparation import read_checkpoint
from snapcap.warmup.store.store import WEIGHTS
from snapcap.warmup.weights import identity, prepare
from snapcap.warmup.weights.find import FoundWeights, find_weights
from snapcap.warmup.weights.key import layout_digest
from snapcap.warmup.weights.prepare import Prepared, prepare_weights
from snapcap.warmup.weights.worker import PrepareJob, prepare_in_worker, weights_worker

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A checkpoint of its own, and an artifact folder."""

    options: StartOptions
    checkpoint: Checkpoint
    plan: Plan

    @property
    def weights(self) -> Path:
        return self.options.store_folder / WEIGHTS

    def find(self, **plan: Any) -> FoundWeights:
        return find_weights(self.checkpoint, replace(self.plan, **plan), self.options.store_folder)

    def prepare(self, thorough: bool = False, **plan: Any) -> Prepared:
        given = replace(self.plan, **plan)
        return prepare_weights(self.checkpoint.folder, given, self.options.store_folder, thorough=thorough)

    def file(self) -> Path:
        (file,) = self.weights.glob("*.safetensors")
        return file

    def is_clean(self) -> bool:
        """Whether nothing half-written is anywhere in the store."""
        files = [path for path in self.options.store_folder.rglob("*") if path.is_file() and path.name != ".lock"]
        return all(path.parent == self.weights and path.suffix in (".safetensors", ".json") for path in files)


def case_of(folder: Path, cache: Path) -> Case:
    options = StartOptions(
        ModelOptions(str(folder), cache), ComputeOptions("cpu", "float32", buckets=(1,), threads=1)
    )
    checkpoint = read_checkpoint(options)
    return Case(options, checkpoint, make_plan(checkpoint.config, options))


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that never stands still: what was just copied counts as at rest."""
    monkeypatch.setattr(identity, "CLOCK_NS", 0)
    monkeypatch.setattr(prepare, "CLOCK_NS", 0)


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("samples", "training", "*.py", "__pycache__")
    return shutil.copytree(demo_folder, tmp_path / "model", ignore=ignored)


@pytest.fixture
def case(folder: Path, tmp_path: Path, no_wait: None) -> Case:
    return case_of(folder, tmp_path / "cache")


def prepared_files(case: Case) -> set[Path]:
    return set(case.weights.glob("*.safetensors"))


def file_system(path: Path) -> str:
    """The type of the one that a path is in."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(mount), kind) for mount, kind in mounts if path.is_relative_to(mount))[1]


def exchange(folder: Path, first: Path, second: Path, prepare: Callable[[], Prepared]) -> list[Prepared]:
    """Prepare a checkpoint with that of ``second`` in its place, and with its own."""
    folder.rename(first)
    second.rename(folder)
    other = prepare()
    folder.rename(second)
    first.rename(folder)
    return [other, prepare()]


def rewrite(folder: Path) -> None:
    """Other weights of the same shapes, in a file of the same size."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, name: tensors[name] + 1}, path)


def test_a_start_finds_what_was_written_after_the_one_before(case: Case) -> None:
    assert case.find().result == "miss"
    assert not case.options.store_folder.exists(), "looking makes nothing"
    assert case.prepare().result == "written"
    assert case.is_clean()
    assert case.file().stat().st_mode & 0o777 == 0o600
    found = case.find()
    assert (found.result, found.reason) == ("hit", case.file().name)
    checkpoint, plan = case.checkpoint, case.plan
    given = (checkpoint.folder, checkpoint.config, checkpoint.transform, plan, CPU, torch.float32)
    ours, theirs = load_model(*given, found.mapped), load_model(*given)
    assert (ours.prepared, theirs.prepared) == (True, False)
    for region, layers in theirs.weights.sets.items():
        for one, other in zip(ours.weights.sets[region], layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert case.prepare().result == "kept"


def test_what_does_not_fit_the_configuration_is_read_from_the_checkpoint(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.prepare()
    mapped = case.find().mapped
    assert mapped is not None
    regions = {**mapped.header.regions, "decoder_block": mapped.header.regions["decoder_block"][1:]}
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
    transform = replace(case.checkpoint.transform, mean=(float("nan"),) * 3)
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
    assert case.file() != before, "the old ones are gone"
    assert case.find().result == "hit"


def test_a_touched_checkpoint_is_read_once_and_written_not_at_all(case: Case, folder: Path) -> None:
    case.prepare()
    before = case.file().stat()
    time.sleep(0.02)
    (folder / "model.safetensors").touch()
    assert case.find().result == "miss"
    assert case.prepare().result == "kept"
    assert case.find().result == "hit"
    assert case.file().stat().st_ino == before.st_ino


def test_a_write_through_a_map_is_a_change(case: Case, folder: Path) -> None:
    if file_system(folder) in ("tmpfs", "ramfs"):
        pytest.skip("ITS TIMES DO NOT FOLLOW MAPS")
    with (folder / "model.safetensors").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[-1] ^= 1
        case.prepare()
        assert case.find().result == "hit"
        time.sleep(0.02)
        memory[-1] ^= 1
        assert case.find().result == "miss"


def test_a_copy_of_a_checkpoint_shares_its_weights(case: Case, folder: Path, tmp_path: Path) -> None:
    case.prepare()
    other = case_of(shutil.copytree(folder, tmp_path / "copy"), case.options.model.cache_dir)
    assert other.find().result == "miss"
    assert other.prepare().result == "kept"
    assert other.find().reason == case.find().reason
    time.sleep(0.02)
    rewrite(folder)
    assert case.prepare().result == "written"
    assert other.find().result == "hit", "what another checkpoint has is not superseded"
    shutil.rmtree(other.checkpoint.folder)
    (folder / "model.safetensors").touch()
    assert case.prepare().result == "kept"
    assert len(prepared_files(case)) == 2, "what is not to be seen here may be there for others"


def test_the_configuration_and_the_sources_are_part_of_the_layout(case: Case, tmp_path: Path) -> None:
    config, transform = case.checkpoint.config, case.checkpoint.transform
    first = layout_digest(config, transform)
    assert layout_digest(config, replace(transform, mean=(0.1, 0.2, 0.3))) != first
    assert layout_digest(replace(config, projected=not config.projected), transform) != first
    models = Path(__file__).parents[3] / "models"
    copy = shutil.copytree(models, tmp_path / "models", ignore=shutil.ignore_patterns("demo", "__pycache__"))
    assert layout_digest(config, transform, copy) == first
    for name in ("weights/gpt2.py", "dimensions.py", "config.py"):
        before = layout_digest(config, transform, copy)
        (copy / name).open("a").write("# another order\n")
        assert layout_digest(config, transform, copy) != before
    (copy / "names.py").unlink()
    with pytest.raises(FileNotFoundError, match="without its sources"):
        layout_digest(config, transform, copy)


def test_two_layouts_of_one_checkpoint_are_kept_beside_each_other(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.prepare()
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "layout_digest", lambda *_: "1" * 64)
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
    for _ in range(2):  # the first time each may take the other for its predecessor
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
    assert {each.name for each in prepared_files(case)} == {*names[:7], Path(case.find().reason).name}
    assert len(list(case.weights.glob("*.json"))) == 1
    old = case.weights / case.find().reason
    os.utime(old, (1, 1))
    case.find()
    assert old.stat().st_mtime > 10**9, "what a start uses is new again"


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


@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_a_folder_that_has_the_name_is_said_before_anything_is_converted(
    case: Case, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.prepare()
    (path,) = case.weights.glob(f"*.{kind}")
    path.unlink()
    path.mkdir()
    monkeypatch.setattr(prepare, "_write", None)
    prepared = case.prepare()
    assert (prepared.result, prepared.reason) == ("skipped", f"{path} is a folder; remove it")


@pytest.mark.parametrize("text", ["[]", '{"files": [{"path": 3}]}', "[" * 9999, None])
def test_no_record_of_others_changes_what_comes_of_it(case: Case, folder: Path, text: str | None) -> None:
    """``None``: one that others may write to."""
    case.prepare()
    stray = case.weights / f"{'0' * 64}.json"
    (record,) = case.weights.glob("*.json")
    stray.write_text(record.read_text() if text is None else text)
    stray.chmod(0o666 if text is None else 0o600)
    before = case.file()
    time.sleep(0.02)
    rewrite(folder)
    assert case.prepare().result == "written"
    assert (stray.exists(), before.exists()) == (True, False)
    assert case.find().result == "hit"


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def without_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 100)


def of_others(path: Path) -> None:
    path.chmod(0o666)


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("ONLY ROOT CAN GIVE A FILE AWAY")
    os.chown(path, 12345, 12345)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [truncated, longer, without_header, of_others, of_another_user, a_link, a_fifo],
    ids=lambda f: f.__name__,
)
def test_a_defect_is_a_miss_and_is_replaced(case: Case, damage: Callable[[Path], None]) -> None:
    case.prepare()
    damage(case.file())
    found = case.find()
    assert (found.result, found.mapped) == ("corrupt", None)
    assert found.reason
    assert case.prepare().result == "written"
    assert case.find().result == "hit"


def test_a_record_that_others_may_write_is_replaced(case: Case) -> None:
    case.prepare()
    (record,) = case.weights.glob("*.json")
    record.chmod(0o666)
    assert case.find().result == "corrupt"
    assert case.prepare().result == "kept"
    assert case.find().result == "hit"


def test_damage_within_is_found_by_who_reads_it_all(case: Case) -> None:
    case.prepare()
    with case.file().open("r+b") as file:
        file.seek(CHUNK_BYTES)
        file.write(b"damage")
    assert case.find().result == "hit", "a start does not read it"
    assert case.prepare().result == "kept"
    assert case.prepare(thorough=True).result == "written"
    assert case.prepare(thorough=True).result == "kept"


def test_only_one_process_prepares(case: Case) -> None:
    case.weights.mkdir(parents=True, mode=0o700)
    with locked_alone(case.weights / ".lock") as alone:
        assert alone
        prepared = case.prepare()
    assert (prepared.result, prepared.reason) == ("busy", "another process is preparing weights")
    assert case.prepare().result == "written"


def test_two_workers_at_once(case: Case) -> None:
    workers = [weights_worker(case.checkpoint.folder, case.plan, case.options) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda worker: prepare_in_worker(worker, thorough=False), workers))
    one, other = sorted(ended, key=lambda each: each.result == "written")
    assert other.result == "written", ended
    assert one.result in ("busy", "kept"), ended
    assert case.find().result == "hit"
    assert case.is_clean()


def test_a_worker_that_is_killed_leaves_one_file_that_the_next_removes(case: Case) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from snapcap.warmup.machine.tasks import from_json
from snapcap.warmup.weights import identity, prepare
from snapcap.warmup.weights.worker import PrepareJob
identity.CLOCK_NS = prepare.CLOCK_NS = 0
write = prepare.write_all
def write_and_die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
prepare.write_all = write_and_die
job = from_json(PrepareJob, sys.argv[1])
prepare.prepare_weights(job.checkpoint, job.plan, job.store, thorough=False)
"""
    job = to_json(PrepareJob(case.checkpoint.folder, case.plan, case.options.store_folder))
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", program, job], check=False, capture_output=True, timeout=120)
        assert run.returncode == -signal.SIGKILL, run.stderr
        (left,) = [path for path in case.weights.iterdir() if path.name != ".lock"]
        assert (left.name, left.stat().st_size > 4096) == (".writing", True)
        assert case.find().result == "miss"
    assert case.prepare().result == "written"
    assert case.is_clean()


def test_what_goes_wrong_in_a_worker_is_a_reason(case: Case, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing")
    worker = weights_worker(folder, case.plan, case.options)
    prepared = prepare_in_worker(worker, thorough=False)
    assert (prepared.result, "model.safetensors is damaged" in prepared.reason) == ("skipped", True)


def test_short_disks_and_memory_are_left_to_others(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 20 << 20))  # type: ignore[attr-defined]
        assert "are free" in case.prepare().reason
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "free_memory", lambda: 100 << 20)
        assert "of memory, and less is free" in case.prepare().reason
    assert case.is_clean()
    assert case.find().result == "miss"
    assert case.prepare().result == "written"


def test_a_disk_that_fills_up_leaves_nothing(case: Case, disk_that_fills_up: None) -> None:
    with pytest.raises(OSError, match="No space left"):
        case.prepare()
    assert case.is_clean()
    assert list(case.weights.glob("*.safetensors")) == []
    assert case.find().result == "miss"


def test_a_checkpoint_that_changes_while_it_is_read_is_not_prepared(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = prepare._write_contents

    def change(*arguments: Any) -> None:
        time.sleep(0.02)
        rewrite(folder)
        real(*arguments)

    monkeypatch.setattr(prepare, "_write_contents", change)
    assert case.prepare().reason == "the checkpoint has changed meanwhile"
    assert case.is_clean()
    assert case.find().result == "miss"


def test_what_was_just_changed_is_waited_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(folder, tmp_path / "cache")
    (folder / "model.safetensors").touch()
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    prepared = case.prepare()
    assert (prepared.result, waited) == ("skipped", [identity.CLOCK_NS / 1e9])
    assert "is being changed" in prepared.reason
    assert case.is_clean()
