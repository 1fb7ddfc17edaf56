"""Disks that are full or read-only: nothing counts that is not whole, and the error says what to do."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.servers.lying_s3 import lying_s3
from support.servers.server_process import clean_environment, wait_until
from support.servers.small_disk import SMALL, fill

from snapcap.warmup.artifacts.fetch import fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import Manifest, describe_all, new_manifest
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import KeyFileError, Signer, Trust, generate_key
from snapcap.warmup.artifacts.store import blob_name, manifest_name
from snapcap.warmup.checkpoints import s3 as s3_checkpoint
from snapcap.warmup.checkpoints.importer import import_checkpoint
from snapcap.warmup.checkpoints.local import CheckpointError
from snapcap.warmup.checkpoints.source import resolve_checkpoint
from snapcap.warmup.machine.files import sync
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import S3Error
from snapcap.warmup.s3.download import PART_BYTES, S3Object, download

pytestmark = pytest.mark.usefixtures("aws_environment")

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_checkpoint, "_SETTLE_SECONDS", 0.0)


@pytest.fixture
def upload(s3: Any) -> Callable[[int], bytes]:
    """``upload(size)``: a checkpoint under s3://bucket/x whose weights, which are returned, have so many bytes."""

    def put(size: int) -> bytes:
        content = os.urandom(size)
        s3.put_object(Bucket="bucket", Key="x/config.json", Body=b"{}")
        s3.put_object(Bucket="bucket", Key="x/model.safetensors", Body=content)
        return content

    return put


def resolve(cache: Path, s3_server: str) -> Path:
    return resolve_checkpoint("s3://bucket/x", cache, S3Options(endpoint_url=s3_server))


def weights(cache: Path) -> list[Path]:
    return list(cache.rglob("*model.safetensors*"))


def test_short_writes_lose_nothing(upload: Any, s3_server: str, tmp_path: Path, short_writes: None) -> None:
    content = upload(PART_BYTES + 5)
    assert (resolve(tmp_path, s3_server) / "model.safetensors").read_bytes() == content


def test_a_disk_that_fills_up_in_the_last_chunk(
    upload: Any,
    s3_server: str,
    tmp_path: Path,
    disk_that_fills_up: None,
) -> None:
    upload(100_001)
    with pytest.raises(CheckpointError) as raised:
        resolve(tmp_path, s3_server)
    for word in ("s3://bucket/x/model.safetensors", str(tmp_path), "No space left", "free some", "--cache-dir"):
        assert word in str(raised.value)
    assert weights(tmp_path) == []


@pytest.mark.parametrize("size", [SMALL - 1000, SMALL + 1])  # the first by one page, in the only chunk
def test_a_full_disk_is_named_and_nothing_counts(
    size: int,
    upload: Any,
    s3_server: str,
    small_disk: Path,
) -> None:
    upload(size)
    # One file is written while the record of another is: whichever is the first to find no space.
    place = r"s3://bucket/x(/\w+\.\w+: | cannot be downloaded to )"
    with pytest.raises(CheckpointError, match=place + r".*No space left.*--cache-dir"):
        resolve(small_disk, s3_server)
    assert weights(small_disk) == []
    content = upload(SMALL // 2)
    assert (resolve(small_disk, s3_server) / "model.safetensors").read_bytes() == content


def test_a_checkpoint_that_is_there_needs_no_space(upload: Any, s3_server: str, small_disk: Path) -> None:
    content = upload(1000)
    folder = resolve(small_disk, s3_server)
    wait_until(lambda: "boot" not in (folder / ".snapcap-s3.json").read_text())
    fill(small_disk)
    assert (resolve(small_disk, s3_server) / "model.safetensors").read_bytes() == content
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert (resolve(small_disk, s3_server) / "model.safetensors").read_bytes() == content
    upload(1000)
    with pytest.raises(CheckpointError, match=r"Read-only file system; make it writable.*--cache-dir"):
        resolve(small_disk, s3_server)


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_every_refusal_of_a_disk_says_what_to_do(
    code: int, upload: Any, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    upload(10)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(CheckpointError, match=rf"{os.strerror(code)}; .*or choose another folder"):
        resolve(tmp_path, s3_server)


def test_what_may_be_in_memory_alone_counts_until_the_machine_is_started_again(
    upload: Any, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("first\n")
    monkeypatch.setattr(s3_checkpoint, "_BOOT", boot)
    monkeypatch.setattr(s3_checkpoint, "sync", lambda _path: (_ for _ in ()).throw(OSError(errno.EIO, "lost")))
    content = upload(1000)
    folder = resolve(tmp_path, s3_server)
    file = folder / "model.safetensors"
    before = file.stat().st_ino
    resolve(tmp_path, s3_server)
    assert file.stat().st_ino == before, "it was downloaded again"
    file.write_bytes(bytes(1000))  # what a power cut leaves
    boot.write_text("second\n")
    monkeypatch.setattr(s3_checkpoint, "sync", sync)
    resolve(tmp_path, s3_server)
    assert file.read_bytes() == content
    wait_until(lambda: "boot" not in (folder / ".snapcap-s3.json").read_text())
    before = file.stat().st_ino
    boot.write_text("third\n")
    resolve(tmp_path, s3_server)
    assert file.stat().st_ino == before, "it was on the disk"


def test_what_a_killed_download_left_is_removed_and_one_under_way_is_not(
    upload: Any, s3_server: str, tmp_path: Path
) -> None:
    upload(1000)
    folder = resolve(tmp_path, s3_server)
    code = (
        "import sys, time; from pathlib import Path; from snapcap.warmup.options import S3Options\n"
        "from snapcap.warmup.s3.client import client\n"
        "from snapcap.warmup.s3.download import S3Object, download\n"
        "s3 = client(S3Options(endpoint_url=sys.argv[1], region='us-east-1', read_timeout=60))\n"
        "items = {Path(sys.argv[2]): S3Object('x/config.json', 1000, '')}\n"
        "list(download(s3, 'bucket', items, time.monotonic() + 60))\n"
    )
    with lying_s3(bytes(1000), "drip") as dripping:
        child = subprocess.Popen(
            [sys.executable, "-c", code, dripping.url, str(folder / "other.model")], env=clean_environment()
        )
        try:
            wait_until(lambda: len(list(folder.glob(".other.model.*.part"))) == 1)
            wait_until(lambda: dripping.gets > 0)
            (folder / ".mine.part").touch()
            resolve(tmp_path, s3_server)
            assert len(list(folder.glob(".*.part"))) == 2
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    resolve(tmp_path, s3_server)
    assert [path.name for path in folder.glob(".*.part")] == [".mine.part"]


def test_nothing_is_made_that_others_may_write(upload: Any, s3_server: str, tmp_path: Path) -> None:
    upload(10)
    before = os.umask(0)
    try:
        folder = resolve(tmp_path / "cache", s3_server)
        # The thread that syncs the files replaces their record meanwhile.
        settle = s3_checkpoint._settle
        wait_until(lambda: not any(getattr(each, "function", None) is settle for each in threading.enumerate()))
    finally:
        os.umask(before)
    made = [tmp_path / "cache", folder.parent, folder, *folder.glob("*.*")]
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def test_artifacts_that_find_no_space_are_a_labelled_error(
    make_s3_store: Callable[[str], S3Store],
    manifest: Manifest,
    signer: Signer,
    trust: Trust,
    tmp_path: Path,
    small_disk: Path,
) -> None:
    remote = make_s3_store("moto")
    (tmp_path / "large").write_bytes(os.urandom(SMALL + 1))
    files = {"large": tmp_path / "large"}
    large = new_manifest("aot", manifest.factors, describe_all(files))
    assert publish(remote, large, files, signer).result == "published"
    local = FolderStore.open(small_disk / "store")
    fetched = fetch(remote, local, large.key, large.factors, trust, 60)
    assert fetched.result == "error"
    assert blob_name(large.entries["large"]) in fetched.reason
    assert str(small_disk) in fetched.reason
    assert "No space left" in fetched.reason
    assert "free some" in fetched.reason
    assert [path for path in small_disk.rglob("*") if path.is_file() and path.stat().st_size] == []


def test_a_set_that_is_there_needs_no_space(
    manifest: Manifest,
    files: dict[str, Path],
    small_disk: Path,
) -> None:
    local = FolderStore.open(small_disk / "store")
    assert publish(local, manifest, files, None).result == "published"
    fill(small_disk)
    assert fetch(None, local, manifest.key, manifest.factors, Trust(), 60).result == "hit"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    again = FolderStore.open(small_disk / "store")
    assert fetch(None, again, manifest.key, manifest.factors, Trust(), 60).result == "hit"
    denied = publish(again, manifest, files, None, replace=True)
    assert denied.result == "denied"
    assert "Read-only file system; make it writable" in denied.reason


def test_a_set_that_cannot_be_published_is_not_there_in_part(
    manifest: Manifest,
    files: dict[str, Path],
    small_disk: Path,
) -> None:
    local = FolderStore.open(small_disk / "store")
    fill(small_disk)
    published = publish(local, manifest, files, None)
    assert published.result == "error"
    assert "No space left on device; free some there, or choose another folder" in published.reason
    assert local.read(manifest_name(manifest.key), 10) is None
    (small_disk / "ballast").unlink()
    assert publish(local, manifest, files, None).result == "published"


def test_an_import_that_finds_no_space_leaves_nothing(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(CheckpointError, match=r"No space left on device.*free some there") as raised:
        import_checkpoint(str(DEMO), small_disk / "imported")
    assert str(small_disk) in str(raised.value)
    assert [path for path in small_disk.rglob("*") if path.is_file() and path.name != "ballast"] == []


def test_a_key_that_finds_no_space_leaves_nothing(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(KeyFileError, match="No space left"):
        generate_key(small_disk / "key")
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_the_file_that_could_not_be_written_is_named(s3: Any, s3_server: str, tmp_path: Path) -> None:
    s3.put_object(Bucket="bucket", Key="x", Body=b"12345")
    target = tmp_path / "folder" / "x.bin"
    target.mkdir(parents=True)
    with pytest.raises(S3Error, match=r"s3://bucket/x: cannot be written to .*/folder/x\.bin: Is a directory"):
        list(download(s3, "bucket", {target: S3Object("x", 5, "")}, time.monotonic() + 60))
