"""Where checkpoints come from: the demo, folders and S3, each from a real server or folder."""

import errno
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.checkpoint_files import SAFE, contents

from snapcap import models
from snapcap.warmup.checkpoints import s3 as s3_checkpoint
from snapcap.warmup.checkpoints.local import kind_of, local_folder
from snapcap.warmup.checkpoints.patterns import CheckpointError
from snapcap.warmup.checkpoints.resolve import resolve_checkpoint
from snapcap.warmup.options import S3Options


def folder_with(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


# --- on this machine


def test_the_demo_is_the_folder_that_ships(tmp_path: Path) -> None:
    folder = resolve_checkpoint("demo", tmp_path, S3Options())
    assert folder == Path(str(models.__file__)).parent / "demo"
    assert (folder / "config.json").is_file()


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "captioner", SAFE)
    assert resolve_checkpoint(str(folder), tmp_path, S3Options()) == folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("captioner", "./captioner", "captioner/", "~/captioner"):
        assert resolve_checkpoint(source, tmp_path, S3Options()).samefile(folder)


@pytest.mark.parametrize("source", ["./none", "../none", "/none", "~/none", "there/none", "a/b/none", "a//b"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=f"there is no folder '{source}'; give a folder, a hub id or s3://"):
        resolve_checkpoint(source, tmp_path, S3Options())


def test_a_file_or_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a file; give the folder that holds config\.json"):
        resolve_checkpoint(str(tmp_path / "model.safetensors"), tmp_path, S3Options())
    with pytest.raises(CheckpointError, match=r"has no config\.json; give the folder"):
        resolve_checkpoint(str(tmp_path), tmp_path, S3Options())


def test_a_folder_imports_neither_torch_nor_boto3_nor_the_hub(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "captioner", SAFE)
    code = (
        "import sys; from pathlib import Path; from snapcap.warmup.options import S3Options\n"
        "from snapcap.warmup.checkpoints.resolve import resolve_checkpoint\n"
        f"resolve_checkpoint({str(folder)!r}, Path('.'), S3Options())\n"
        "print({'torch', 'boto3', 'botocore', 'huggingface_hub', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- S3


def upload(s3: Any, prefix: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        s3.put_object(Bucket="bucket", Key=f"{prefix}/{name}", Body=content)


def test_a_prefix_becomes_a_folder(s3: Any, s3_server: str, tmp_path: Path) -> None:
    upload(s3, "a/captioner", SAFE | {"README.md": b"#", "optimizer.pt": b"!", "pytorch_model.bin": b"old"})
    upload(s3, "a/captioner/checkpoint-5", SAFE)
    upload(s3, "a/captioner-2", {"merges.txt": b""})
    options = S3Options(endpoint_url=s3_server)
    folder = resolve_checkpoint("s3://bucket/a/captioner/", tmp_path, options)
    assert contents(folder) == SAFE
    assert tmp_path in folder.parents
    assert resolve_checkpoint("s3://bucket/a/captioner", tmp_path, options) == folder


def test_pickles_are_taken_where_there_is_nothing_else(s3: Any, s3_server: str, tmp_path: Path) -> None:
    sharded = {
        "config.json": b"{}",
        "vocab.json": b"{}",
        "merges.txt": b"",
        "pytorch_model.bin.index.json": b"{}",
        "pytorch_model-00001-of-00002.bin": b"1",
        "pytorch_model-00002-of-00002.bin": b"2",
    }
    upload(s3, "old", sharded | {"training_args.bin": b"!"})
    folder = resolve_checkpoint("s3://bucket/old", tmp_path, S3Options(endpoint_url=s3_server))
    assert contents(folder) == sharded


def test_only_what_changed_is_downloaded_again(s3: Any, s3_server: str, tmp_path: Path) -> None:
    def fetch() -> Path:
        return resolve_checkpoint("s3://bucket/x", tmp_path, S3Options(endpoint_url=s3_server))

    def inodes(folder: Path) -> dict[str, int]:
        return {name: (folder / name).stat().st_ino for name in contents(folder)}

    upload(s3, "x", SAFE)
    folder = fetch()
    before = inodes(folder)
    fetch()
    assert inodes(folder) == before

    upload(s3, "x", {"config.json": b"[]"})  # as long as before: only the ETag tells
    (folder / "tokenizer.json").write_bytes(b"cut")
    fetch()
    assert contents(folder) == SAFE | {"config.json": b"[]"}
    assert inodes(folder)["model.safetensors"] == before["model.safetensors"]

    s3.delete_object(Bucket="bucket", Key="x/tokenizer.json")
    fetch()
    assert "tokenizer.json" not in contents(folder)

    (folder / ".snapcap-s3.json").write_text("{ damaged")
    fetch()
    assert contents(folder) == {"config.json": b"[]", "model.safetensors": b"weights"}


def test_a_failed_download_is_continued(s3: Any, s3_server: str, tmp_path: Path) -> None:
    """The disk refuses one file; what came before it is not downloaded again."""
    upload(s3, "x", SAFE)
    options = S3Options(endpoint_url=s3_server)
    folder = resolve_checkpoint("s3://bucket/x", tmp_path, options)
    kept = (folder / "config.json").stat().st_ino
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: Is a directory"):
        resolve_checkpoint("s3://bucket/x", tmp_path, options)
    (folder / "model.safetensors").rmdir()
    resolve_checkpoint("s3://bucket/x", tmp_path, options)
    assert contents(folder) == SAFE
    assert (folder / "config.json").stat().st_ino == kept


def test_equal_prefixes_of_two_buckets_do_not_meet(s3: Any, s3_server: str, tmp_path: Path) -> None:
    s3.create_bucket(Bucket="other")
    upload(s3, "x", SAFE)
    s3.put_object(Bucket="other", Key="x/config.json", Body=b"other")
    options = S3Options(endpoint_url=s3_server)
    first, second = (resolve_checkpoint(f"s3://{b}/x", tmp_path, options) for b in ("bucket", "other"))
    assert contents(first) == SAFE
    assert contents(second) == {"config.json": b"other"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("s3://nothing/x", "s3://nothing/x: the bucket does not exist"),
        ("s3://bucket/nothing", "there is nothing under s3://bucket/nothing; check the prefix"),
        ("s3://bucket/part", r"s3://bucket/part has no config\.json"),
        ("s3://", r"is not an S3 address; write s3://bucket/prefix"),
    ],
)
def test_a_wrong_address_is_one_line(s3: Any, s3_server: str, tmp_path: Path, source: str, expected: str) -> None:
    upload(s3, "part", {"tokenizer.json": b"{}"})
    with pytest.raises(CheckpointError, match=expected) as caught:
        resolve_checkpoint(source, tmp_path, S3Options(endpoint_url=s3_server))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("aws_environment")
def test_an_endpoint_that_never_answers_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(CheckpointError, match="s3://bucket/x: connected, but no answer"):
            resolve_checkpoint("s3://bucket/x", tmp_path, S3Options(endpoint_url=endpoint, deadline=0.5))


@contextmanager
def outage(kind: str) -> Iterator[str]:
    """The address of an S3 server that is out of order in some way."""
    if kind == "no such host":
        yield "http://s3.invalid:9000"
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if kind == "silent":
            yield f"http://127.0.0.1:{port}"
            return
    if kind == "refused":
        yield f"http://127.0.0.1:{port}"
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(kind))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


OUTAGES = ["no such host", "refused", "silent", "403", "500", "503"]


@pytest.mark.parametrize("kind", OUTAGES)
def test_without_s3_a_whole_checkpoint_on_the_disk_is_used(
    kind: str,
    s3: Any,
    s3_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    upload(s3, "x", SAFE)
    source = "s3://bucket/x"
    folder = resolve_checkpoint(source, tmp_path, S3Options(endpoint_url=s3_server))
    monkeypatch.setattr(s3_checkpoint, "OUTAGE_S", 1.0)
    with outage(kind) as endpoint:
        down = S3Options(endpoint_url=endpoint)
        with pytest.raises(CheckpointError):
            resolve_checkpoint(source, tmp_path, replace(down, deadline=1.0))
        caplog.clear()
        known = s3_checkpoint.local_folder(source, tmp_path, down)
        shutil.rmtree(known, ignore_errors=True)
        shutil.copytree(folder, known)
        began = time.monotonic()
        assert resolve_checkpoint(source, tmp_path, down) == known
        assert time.monotonic() - began < down.deadline / 2, "which would be the time of a download"
    (line,) = (record for record in caplog.records if record.name.startswith("snapcap"))
    assert "does not answer; the copy on this disk is used" in line.message
    assert contents(known) == SAFE


@pytest.mark.parametrize("damage", ["cut", "gone", "between revisions", "lost with the power", "no weights"])
def test_without_s3_part_of_a_checkpoint_is_not_used(damage: str, s3: Any, s3_server: str, tmp_path: Path) -> None:
    upload(s3, "x", SAFE)
    source, options = "s3://bucket/x", S3Options(endpoint_url=s3_server)
    folder = resolve_checkpoint(source, tmp_path, options)
    assert s3_checkpoint.is_whole(folder)
    match damage:
        case "cut":
            (folder / "tokenizer.json").write_bytes(b"")
        case "gone":
            (folder / "tokenizer.json").unlink()
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "lost with the power":
            record = json.loads((folder / ".snapcap-s3.json").read_text())
            (folder / ".snapcap-s3.json").write_text(
                json.dumps({name: entry | {"boot": "another"} for name, entry in record.items()})
            )
        case _:
            upload(s3, "x", {"config.json": b"[]", "model.safetensors": b"others"})
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors").mkdir()
            with pytest.raises(CheckpointError, match="Is a directory"):
                resolve_checkpoint(source, tmp_path, options)
            (folder / "model.safetensors").rmdir()
            (folder / "model.safetensors").write_bytes(b"weights")
    assert not s3_checkpoint.is_whole(folder)
    assert contents(resolve_checkpoint(source, tmp_path, options)).keys() == SAFE.keys()
    assert s3_checkpoint.is_whole(folder)


def test_a_cache_that_cannot_be_written_is_named(s3: Any, s3_server: str, tmp_path: Path) -> None:
    upload(s3, "x", SAFE)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"s3://bucket/x .*cache: .*; choose another folder \(--cache-dir\)"):
        resolve_checkpoint("s3://bucket/x", tmp_path / "cache", S3Options(endpoint_url=s3_server))


@pytest.mark.parametrize("source", ["x" * 300, "owner/" + "x" * 300, "~nobody-here/model", "\udcff/model"])
def test_a_name_that_no_file_can_have_is_an_error_of_one_line(source: str) -> None:
    assert kind_of(source) in ("folder", "hub")
    with suppress(CheckpointError):  # and nothing else
        assert local_folder(source) is None


def test_a_folder_that_may_not_be_read_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        local_folder(str(tmp_path / "model"))
