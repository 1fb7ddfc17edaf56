"""Weights become a file of the cache when every chunk of them is right, and nothing else ever does."""

import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fakes.passing_time import ModuleClock
from support.servers.server_process import wait_until

from snapcap.warmup.artifacts import download
from snapcap.warmup.artifacts.download import (
    LOCK,
    VERIFIED,
    WRITING,
    download_weights,
    fetched_name,
    fetching_name,
    finish,
)
from snapcap.warmup.artifacts.fetch import Found, local_weights
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import CHUNK_BYTES
from snapcap.warmup.artifacts.publish import ModelFiles
from snapcap.warmup.artifacts.store import WEIGHTS, DamagedError, Ranges, StoreError, blob_name
from snapcap.warmup.machine.files import locked_alone

PATIENCE = 60.0


class Source:
    """A store with one object, and a way to send it."""

    def __init__(self, data: bytes, read: "Callable[[bytes, int, int], Iterator[bytes]] | None" = None) -> None:
        self._data = data
        self._read = read or plain
        self.reads = 0

    @contextlib.contextmanager
    def ranges(self, name: str, size: int, deadline: float) -> Iterator[Ranges]:
        def read(start: int, end: int) -> Iterator[bytes]:
            self.reads += 1
            return self._read(self._data, start, end)

        yield read


def plain(data: bytes, start: int, end: int) -> Iterator[bytes]:
    for place in range(start, end, 1 << 20):
        yield data[place : min(end, place + (1 << 20))]


def fetch(source: Any, local: FolderStore, model: ModelFiles, seconds: float = PATIENCE) -> int:
    """Both steps."""
    with contextlib.ExitStack() as scope:
        got = download_weights(source, local, model.manifest.model_weights, time.monotonic() + seconds, scope)
        if got:
            assert part(local, model, VERIFIED).is_file(), "it counts for nobody yet"
            finish(local, model.manifest.model_weights)
        return got


def weights(local: FolderStore) -> list[Path]:
    """What is there, but for locks."""
    return [path for path in (local.root / WEIGHTS).iterdir() if not path.name.endswith(".lock")]


def part(local: FolderStore, model: ModelFiles, name: str) -> Path:
    """A file of the download of a model."""
    return local.root / WEIGHTS / fetching_name(model.manifest.model_weights.content, name)


def test_a_file_is_whole_and_only_its_owners(local: FolderStore, model: ModelFiles) -> None:
    source = Source(model.weights.read_bytes())
    assert fetch(source, local, model) == model.manifest.model_weights.size
    (file,) = weights(local)
    assert file.name == fetched_name(model.manifest.model_weights.content)
    assert file.read_bytes() == model.weights.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    assert source.reads == 3
    assert fetch(source, local, model) == 0, "it is there"
    assert source.reads == 3


def test_what_came_by_another_manifest_is_nobodys_whatever_digest_that_names(
    local: FolderStore, model: ModelFiles
) -> None:
    """As one that a key had signed which is not trusted any more."""
    evil = bytes(model.manifest.model_weights.size)
    chunks = tuple(
        hashlib.sha256(evil[start : start + CHUNK_BYTES]).hexdigest() for start in range(0, len(evil), CHUNK_BYTES)
    )
    described = replace(model.manifest.model_weights, chunks=chunks)
    other = replace(model, manifest=replace(model.manifest, weights=described))
    assert fetch(Source(evil), local, other)
    assert local_weights(local, Found(other.manifest, vouched=False)) is not None
    found = Found(model.manifest, vouched=False)
    assert local_weights(local, found) is None
    assert fetch(Source(model.weights.read_bytes()), local, model)
    name = local_weights(local, found)
    assert name is not None
    assert (local.root / name).read_bytes() == model.weights.read_bytes()


def test_a_call_of_the_system_may_write_a_part(
    local: FolderStore, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, memoryview(data)[:300_000], offset))
    fetch(Source(model.weights.read_bytes()), local, model)
    assert weights(local)[0].read_bytes() == model.weights.read_bytes()


def flipped(data: bytes, start: int, end: int) -> Iterator[bytes]:
    for piece in plain(data, start, end):
        yield piece[:-1] + bytes([piece[-1] ^ 1]) if start else piece


def short(data: bytes, start: int, end: int) -> Iterator[bytes]:
    return plain(data, start, end - 1)


def long(data: bytes, start: int, end: int) -> Iterator[bytes]:
    yield from plain(data, start, end)
    yield b"!"


def exchanged(data: bytes, start: int, end: int) -> Iterator[bytes]:
    """Each chunk is one of the file, and none is the one that was asked for."""
    other = (start + CHUNK_BYTES) % (2 * CHUNK_BYTES) if start < 2 * CHUNK_BYTES else start
    return plain(data, other, other + end - start)


def breaking(data: bytes, start: int, end: int) -> Iterator[bytes]:
    yield data[start : start + 1000]
    raise StoreError("the connection is gone")


@pytest.mark.parametrize(
    ("read", "kind", "said"),
    [
        (flipped, DamagedError, "chunk"),
        (short, DamagedError, "chunk"),
        (long, DamagedError, "more bytes"),
        (exchanged, DamagedError, "chunk"),
        (breaking, StoreError, "connection"),
    ],
)
def test_what_is_not_right_leaves_nothing(
    read: Callable[..., Iterator[bytes]],
    kind: type[Exception],
    said: str,
    local: FolderStore,
    model: ModelFiles,
) -> None:
    with pytest.raises(kind, match=said):
        fetch(Source(model.weights.read_bytes(), read), local, model)
    assert weights(local) == []
    fetch(Source(model.weights.read_bytes()), local, model)


def test_an_object_that_was_cut_is_not_read(
    local: FolderStore, shop: FolderStore, model: ModelFiles, put: Callable[..., Any]
) -> None:
    put(shop, model)
    os.truncate(shop.path(blob_name(model.manifest.model_weights.file)), CHUNK_BYTES)
    with pytest.raises(DamagedError, match="missing or not of"):
        fetch(shop, local, model)
    assert weights(local) == []


def test_a_source_that_stands_still_is_given_up(local: FolderStore, model: ModelFiles) -> None:
    over = threading.Event()

    def stuck(data: bytes, start: int, end: int) -> Iterator[bytes]:
        yield data[start : start + 10]
        over.wait(PATIENCE)

    with pytest.raises(StoreError, match="deadline"):
        fetch(Source(model.weights.read_bytes(), stuck), local, model, seconds=0.3)
    over.set()
    assert weights(local) == []


def test_a_full_disk_leaves_nothing(local: FolderStore, model: ModelFiles, disk_that_fills_up: None) -> None:
    with pytest.raises(StoreError, match="free some there"):
        fetch(Source(model.weights.read_bytes()), local, model)
    assert weights(local) == []


def test_what_does_not_fit_is_not_begun(
    local: FolderStore, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    class Full:
        f_frsize, f_blocks, f_bavail = 4096, 1 << 20, model.manifest.model_weights.size // 4096 - 1

    monkeypatch.setattr(os, "statvfs", lambda path: Full() if "weights" in str(path) else real(path))
    source = Source(model.weights.read_bytes())
    with pytest.raises(StoreError, match="free some there"):
        fetch(source, local, model)
    assert (weights(local), source.reads) == ([], 0)


@pytest.mark.parametrize("name", [WRITING, VERIFIED])
@pytest.mark.parametrize("what", ["link", "folder", "FIFO"])
def test_what_lies_under_a_temporary_name_is_never_written_to(
    what: str, name: str, local: FolderStore, model: ModelFiles, tmp_path: Path
) -> None:
    folder, victim = local.root / WEIGHTS, tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    temporary = part(local, model, name)
    match what:
        case "link":
            temporary.symlink_to(victim)
        case "FIFO":
            os.mkfifo(temporary)
        case _:
            temporary.mkdir()
    if what == "folder":
        with pytest.raises(StoreError, match="cannot be written"):
            fetch(Source(model.weights.read_bytes()), local, model)
    else:
        fetch(Source(model.weights.read_bytes()), local, model)
    assert victim.read_text() == "mine"


def test_a_link_under_the_files_name_is_replaced(local: FolderStore, model: ModelFiles, tmp_path: Path) -> None:
    folder, victim = local.root / WEIGHTS, tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"x" * model.manifest.model_weights.size)
    (folder / fetched_name(model.manifest.model_weights.content)).symlink_to(victim)
    fetch(Source(model.weights.read_bytes()), local, model)
    (file,) = weights(local)
    assert not file.is_symlink()
    assert set(victim.read_bytes()) == set(b"x")


def test_two_at_once_download_once(local: FolderStore, model: ModelFiles) -> None:
    source = Source(model.weights.read_bytes())
    until = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as first:
        assert download_weights(source, local, model.manifest.model_weights, until, first)  # type: ignore[arg-type]
        results: list[int] = []
        thread = threading.Thread(target=lambda: results.append(fetch(source, local, model)))
        thread.start()
        time.sleep(0.2)
        assert not results, "it waits for the first one's disk"
        finish(local, model.manifest.model_weights)
    thread.join(PATIENCE)
    assert (results, source.reads) == ([0], 3)


@pytest.mark.usefixtures("without_locks")
def test_without_locks_each_fetches_a_file_of_its_own(local: FolderStore, model: ModelFiles) -> None:
    data, scopes = model.weights.read_bytes(), contextlib.ExitStack()
    (local.root / WEIGHTS).mkdir()
    left = part(local, model, f"{WRITING}.{'0' * 32}")
    left.touch()
    os.utime(left, (time.time() - 7200,) * 2)

    def while_another_fetches(data: bytes, start: int, end: int) -> Iterator[bytes]:
        if start == 0:
            assert fetch(Source(data), local, model) == len(data)
        yield from plain(data, start, end)

    with scopes:
        source: Any = Source(data, while_another_fetches)
        got = download_weights(source, local, model.manifest.model_weights, time.monotonic() + PATIENCE, scopes)
        finish(local, model.manifest.model_weights)
    assert got == len(data)
    (file,) = weights(local)
    assert file.read_bytes() == data
    assert fetch(source, local, model) == 0


def test_who_has_the_lock_for_too_long_is_named(local: FolderStore, model: ModelFiles) -> None:
    source = Source(model.weights.read_bytes())
    with contextlib.ExitStack() as first:
        download_weights(source, local, model.manifest.model_weights, time.monotonic() + PATIENCE, first)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="another process"):
            fetch(source, local, model, seconds=0.2)
        assert weights(local) == [part(local, model, VERIFIED)], "which is the first one's"


def test_another_model_waits_for_nobody_and_leaves_what_is_being_fetched(
    local: FolderStore, model: ModelFiles, small: ModelFiles
) -> None:
    with contextlib.ExitStack() as first:
        until = time.monotonic() + PATIENCE
        source: Any = Source(model.weights.read_bytes())
        download_weights(source, local, model.manifest.model_weights, until, first)
        assert fetch(Source(small.weights.read_bytes()), local, small)
        assert part(local, model, VERIFIED).is_file()
        finish(local, model.manifest.model_weights)
    assert len(weights(local)) == 2


def test_who_does_not_go_on_is_not_waited_for_until_the_deadline(
    local: FolderStore, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ModuleClock()
    monkeypatch.setattr(download, "time", clock)
    silent = download._SILENT_S
    (local.root / WEIGHTS).mkdir()
    source = Source(model.weights.read_bytes())
    with locked_alone(part(local, model, LOCK)) as stopped:
        assert stopped
        writing = part(local, model, WRITING)
        writing.touch()
        moment, over = 0, threading.Event()

        def go_on() -> None:
            nonlocal moment
            for moment in range(1, 9):
                os.utime(writing, (moment, moment))
                clock.forward(silent / 2)
                time.sleep(0.1)  # the other one looks twice as often
            while not over.wait(0.1):
                clock.forward(silent)

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        with pytest.raises(StoreError, match="makes no progress"):
            fetch(source, local, model, seconds=20 * silent)
        over.set()
        assert moment == 8, "as long as the other one writes, it is waited for"
        thread.join()
    monkeypatch.setattr(download, "time", time)
    assert fetch(source, local, model), "a lock ends with who has it"


def test_what_killed_downloads_of_other_models_left_goes_with_their_locks(
    local: FolderStore, model: ModelFiles
) -> None:
    folder, other = local.root / WEIGHTS, "ab" * 32
    folder.mkdir()
    for name in (LOCK, WRITING, VERIFIED):
        (folder / fetching_name(other, name)).touch()
    (folder / ".mine.writing").touch()
    fetch(Source(model.weights.read_bytes()), local, model)
    kept = {path.name for path in folder.iterdir()}
    own = {
        fetched_name(model.manifest.model_weights.content),
        fetching_name(model.manifest.model_weights.content, LOCK),
    }
    assert kept == {".mine.writing", *own}


def test_killed_downloads_leave_one_file_that_the_next_removes(
    local: FolderStore, shop: FolderStore, model: ModelFiles, put: Callable[..., Any], tmp_path: Path
) -> None:
    put(shop, model)
    program = """
import contextlib, sys, time
from pathlib import Path
from snapcap.warmup.artifacts.signing import OWNER
from snapcap.warmup.artifacts import folder
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.download import download_weights
from snapcap.warmup.artifacts.manifest import MAX_ENVELOPE_BYTES, open_envelope
from snapcap.warmup.artifacts.store import model_name
real = folder._pieces
def slow(*given):
    for piece in real(*given):
        yield piece
        time.sleep(60)
folder._pieces = slow
shop, local = FolderStore.open(Path(sys.argv[1])), FolderStore.open(Path(sys.argv[2]))
manifest = open_envelope(shop.read(model_name(sys.argv[3]), MAX_ENVELOPE_BYTES).data, OWNER)
with contextlib.ExitStack() as scope:
    download_weights(shop, local, manifest.model_weights, time.monotonic() + 60, scope)
"""
    for _ in range(3):
        arguments = [str(shop.root), str(local.root), model.manifest.key]
        process = subprocess.Popen([sys.executable, "-c", program, *arguments])
        temporary = part(local, model, WRITING)
        number = temporary.stat().st_ino if temporary.exists() else None

        def is_new(temporary: Path = temporary, number: int | None = number) -> bool:
            with contextlib.suppress(FileNotFoundError):
                status = temporary.stat()
                return status.st_blocks > 0 and status.st_ino != number
            return False

        try:
            wait_until(is_new, PATIENCE)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert weights(local) == [temporary]
        # So that the next one cannot have the same number.
        os.link(temporary, tmp_path / f"kept-{time.monotonic_ns()}")
    fetch(shop, local, model)
    (file,) = weights(local)
    assert file.read_bytes() == model.weights.read_bytes()


def test_a_file_that_cannot_be_kept_is_said(
    local: FolderStore, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(download, "commit", commit)
    with pytest.raises(StoreError, match="cannot be kept"):
        fetch(Source(model.weights.read_bytes()), local, model)
    assert weights(local) == []


def test_only_the_newest_are_kept(local: FolderStore, model: ModelFiles) -> None:
    folder = local.root / WEIGHTS
    folder.mkdir()
    for number in range(12):
        old = folder / fetched_name(f"{number:064x}")
        old.touch()
        os.utime(old, (number, number))
    (folder / "mine.safetensors").touch()
    fetch(Source(model.weights.read_bytes()), local, model)
    names = {path.name for path in weights(local)}
    assert len(names) == 9
    assert {"mine.safetensors", fetched_name(model.manifest.model_weights.content)} < names


def test_a_full_disk_loses_what_nobody_has_used_for_a_day(
    local: FolderStore, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    (local.root / WEIGHTS).mkdir()
    other, source = local.root / WEIGHTS / fetched_name("0" * 64), Source(model.weights.read_bytes())
    size = model.weights.stat().st_size
    other.write_bytes(bytes(size))
    monkeypatch.setattr(download, "free_bytes", lambda _: 0 if other.exists() else size)
    with pytest.raises(StoreError, match="No space left"):
        fetch(source, local, model)
    assert (other.exists(), source.reads) == (True, 0)
    os.utime(other, (time.time() - 2 * 86_400,) * 2)
    assert fetch(source, local, model)
    assert not other.exists()


def test_a_disk_that_stays_too_full_loses_nothing(
    local: FolderStore, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    (local.root / WEIGHTS).mkdir()
    other = local.root / WEIGHTS / fetched_name("0" * 64)
    other.write_bytes(b"small")
    os.utime(other, (time.time() - 2 * 86_400,) * 2)
    monkeypatch.setattr(download, "free_bytes", lambda _: 0)
    with pytest.raises(StoreError, match="No space left"):
        fetch(Source(model.weights.read_bytes()), local, model)
    assert other.exists()
