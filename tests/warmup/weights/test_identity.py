"""The identity of a checkpoint's files: any change gives another, and what the clock cannot tell is not trusted."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from snapcap.models.weights.listing import WeightsError
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.store import WEIGHTS, StoreRefusedError, record_name
from snapcap.warmup.weights.find import (
    CLOCK_NS,
    Record,
    content_digest,
    identify,
    is_at_rest,
    recorded_digest,
    write_record,
)

DIGEST = "ab" * 32


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


@pytest.fixture
def record(checkpoint: Path, local: FolderStore) -> Record:
    """In ``local``, made when the files had been at rest."""
    made = Record(identify(checkpoint), DIGEST, time.time_ns() + CLOCK_NS)
    write_record(local, checkpoint, made)
    return made


def rewrite_in_place(path: Path) -> None:
    """The same size, and the times of before, as far as they can be set."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"WEIGHTS")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_rename(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


def touch(path: Path) -> None:
    path.touch()


def lead_elsewhere(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


CHANGES = [rewrite_in_place, replace_by_rename, touch, lead_elsewhere]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_another_identity(
    change: Callable[[Path], None], checkpoint: Path, record: Record, local: FolderStore
) -> None:
    assert recorded_digest(local, checkpoint, identify(checkpoint)) == DIGEST
    time.sleep(0.02)  # more than a tick of the kernel's clock
    change(checkpoint / "model.safetensors")
    assert recorded_digest(local, checkpoint, identify(checkpoint)) is None


def test_shards_are_all_looked_at(checkpoint: Path, local: FolderStore) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "one.safetensors")
    shutil.copy(checkpoint / "one.safetensors", checkpoint / "two.safetensors")
    index = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    (checkpoint / "model.safetensors.index.json").write_text(index)
    write_record(local, checkpoint, Record(identify(checkpoint), DIGEST, time.time_ns() + CLOCK_NS))
    assert recorded_digest(local, checkpoint, identify(checkpoint)) == DIGEST
    before = content_digest(checkpoint)
    time.sleep(0.02)
    rewrite_in_place(checkpoint / "two.safetensors")
    assert recorded_digest(local, checkpoint, identify(checkpoint)) is None
    assert content_digest(checkpoint) != before


def test_an_index_is_looked_at_as_it_says_which_shard_holds_a_tensor(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "one.safetensors")
    shutil.copy(checkpoint / "one.safetensors", checkpoint / "two.safetensors")
    index, files = checkpoint / "model.safetensors.index.json", ("one.safetensors", "two.safetensors")
    index.write_text(json.dumps({"weight_map": dict(zip("ab", files, strict=True))}))
    before = identify(checkpoint), content_digest(checkpoint)
    index.write_text(json.dumps({"weight_map": dict(zip("ba", files, strict=True))}))
    assert identify(checkpoint) != before[0]
    assert content_digest(checkpoint) != before[1]


def test_a_checkpoint_without_weights_has_no_identity(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(WeightsError):
        identify(checkpoint)


def test_what_changed_shortly_before_it_was_read_could_change_at_the_same_time(checkpoint: Path) -> None:
    files = identify(checkpoint)
    last = max(max(file.changed, file.modified) for file in files)
    assert not is_at_rest(files, last)
    assert not is_at_rest(files, last + CLOCK_NS - 1)
    assert is_at_rest(files, last + CLOCK_NS)


@pytest.mark.parametrize("time", ["changed", "modified"])
def test_a_time_in_the_future_is_not_that_of_the_next_change(checkpoint: Path, time: str) -> None:
    """The clock was ahead when the files were written, or an archive has the times of another time zone."""
    (file,) = identify(checkpoint)
    now = max(file.changed, file.modified) + CLOCK_NS
    assert is_at_rest((replace(file, **{time: now + CLOCK_NS}),), now)
    assert not is_at_rest((replace(file, **{time: now + CLOCK_NS - 1}),), now)


def test_a_record_that_was_made_too_early_is_not_trusted(checkpoint: Path, local: FolderStore) -> None:
    write_record(local, checkpoint, Record(identify(checkpoint), DIGEST, time.time_ns()))
    assert recorded_digest(local, checkpoint, identify(checkpoint)) is None


def test_each_place_has_its_record(checkpoint: Path, record: Record, local: FolderStore, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    assert record_name(WEIGHTS, link) == record_name(WEIGHTS, checkpoint)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert recorded_digest(local, copy, identify(copy)) is None
    assert content_digest(copy) == content_digest(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"files": 3}',
        '{"files": [{"name": 1}], "digest": "", "began": 1}',
        '{"files": [{"name": "", "path": 3, "size": 1, "modified": 1, "changed": 1, "inode": 1}], "digest": "'
        + DIGEST
        + '", "began": 1}',
        "[" * 9999,
    ],
)
def test_a_record_that_is_none_is_not_there(
    text: str, checkpoint: Path, record: Record, local: FolderStore
) -> None:
    local.path(record_name(WEIGHTS, checkpoint)).write_text(text)
    assert recorded_digest(local, checkpoint, identify(checkpoint)) is None
    whole = Record(record.files, "no digest", record.began)
    write_record(local, checkpoint, whole)
    assert recorded_digest(local, checkpoint, identify(checkpoint)) is None


def test_a_record_that_others_may_write_is_refused(checkpoint: Path, record: Record, local: FolderStore) -> None:
    local.path(record_name(WEIGHTS, checkpoint)).chmod(0o606)
    with pytest.raises(StoreRefusedError):
        recorded_digest(local, checkpoint, identify(checkpoint))
