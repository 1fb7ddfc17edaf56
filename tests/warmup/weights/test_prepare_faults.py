"""Damages, crowds and kills the preparation of weights: nothing half-made counts, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.prepared_case import Case, case_of, rewrite

from snapcap.models.json_object import to_json
from snapcap.models.weights.prepared import CHUNK_BYTES
from snapcap.warmup.artifacts import download
from snapcap.warmup.artifacts.download import UNFINISHED
from snapcap.warmup.machine.files import locked_alone
from snapcap.warmup.plan.plan import PlannedJob
from snapcap.warmup.weights import find, prepare
from snapcap.warmup.weights.prepare import prepare_in_worker, weights_worker


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


@pytest.mark.usefixtures("without_locks")
def test_without_locks_each_process_prepares_a_file_of_its_own(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.weights.mkdir(parents=True, mode=0o700)
    left = case.weights / f"{UNFINISHED}.{'0' * 32}"
    left.touch()
    os.utime(left, (time.time() - 7200,) * 2)
    write, inner = prepare._write_contents, []

    def while_another_prepares(path: Path, contents: Any) -> None:
        write(path, contents)
        if not inner:
            inner.append(None)
            inner.append(case.prepare())
            assert path.exists(), "what another process writes stays"

    monkeypatch.setattr(prepare, "_write_contents", while_another_prepares)
    assert case.prepare().result == "written"
    assert inner[1] is not None
    assert inner[1].result == "written"
    assert case.find().result == "hit"
    assert case.is_clean()


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
from snapcap.models.json_object import from_json
from snapcap.warmup.weights import find, prepare
from snapcap.warmup.plan.plan import PlannedJob
find.CLOCK_NS = prepare.CLOCK_NS = 0
write = prepare.write_all
def write_and_die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
prepare.write_all = write_and_die
job = from_json(PlannedJob, sys.argv[1])
prepare.prepare_weights(job.checkpoint, job.plan, job.folder, thorough=False)
"""
    job = to_json(PlannedJob(case.checkpoint.folder, case.plan, case.options.store_folder))
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
        patched.setattr(download, "free_bytes", lambda _: 20 << 20)
        assert "are free" in case.prepare().reason
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "free_memory", lambda: 100 << 20)
        assert "of memory, and less is free" in case.prepare().reason
    assert case.is_clean()
    assert case.find().result == "miss"
    assert case.prepare().result == "written"


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", 2), ("int8", 2.5)])
def test_memory_is_left_for_the_weights_before_and_after_their_conversion(
    dtype: str, sizes: float, case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 16 bits become float32, and int8 beside that."""
    needed = int(sizes * (folder / "model.safetensors").stat().st_size) + prepare._PROCESS_BYTES
    monkeypatch.setattr(prepare, "free_memory", lambda: needed - 1)
    assert case.prepare(dtype=dtype).result == "skipped"
    monkeypatch.setattr(prepare, "free_memory", lambda: needed)
    assert case.prepare(dtype=dtype).result == "written"


@pytest.mark.parametrize(("days", "result"), [(0.5, "skipped"), (2.0, "written")])
def test_a_full_disk_loses_what_nobody_has_used_for_a_day(
    days: float, result: str, case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.prepare().result == "written"
    before, used = case.file(), time.time() - days * 86_400
    os.utime(before, (used, used))
    needed = 2 * before.stat().st_size
    monkeypatch.setattr(download, "free_bytes", lambda _: needed // 2 if before.exists() else needed)
    time.sleep(0.02)
    rewrite(folder)
    assert case.prepare().result == result
    assert before.exists() == (result == "skipped")


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
    assert (prepared.result, waited) == ("skipped", [find.CLOCK_NS / 1e9])
    assert "is being changed" in prepared.reason
    assert case.is_clean()
