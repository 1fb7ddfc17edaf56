"""Where checkpoints come from: the demo, folders and S3, each from a real server or folder."""

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
from support.checkpoints.permissions import denied
from support.servers.server_process import reserved_port

from snapcap.models import demo
from snapcap.models.config import ConfigError, ModelConfig
from snapcap.warmup.checkpoints import s3 as s3_checkpoint
from snapcap.warmup.checkpoints.local import CheckpointError, kind_of, local_folder
from snapcap.warmup.checkpoints.s3 import downloaded_identity, listed_identity
from snapcap.warmup.checkpoints.source import resolve_checkpoint
from snapcap.warmup.options import S3Options


def folder_with(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


# --- on this machine


def test_the_demo_is_the_folder_that_ships(tmp_path: Path) -> None:
    folder = resolve_checkpoint("demo", tmp_path, S3Options())
    assert folder == Path(str(demo.__file__)).parent
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
        "from snapcap.warmup.checkpoints.source import resolve_checkpoint\n"
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
        "pytorch_model.bin.index.json": index(
            "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
        ),
        "pytorch_model-00001-of-00002.bin": b"1",
        "pytorch_model-00002-of-00002.bin": b"2",
    }
    upload(s3, "old", sharded | {"training_args.bin": b"!"})
    folder = resolve_checkpoint("s3://bucket/old", tmp_path, S3Options(endpoint_url=s3_server))
    assert contents(folder) == sharded


def index(*files: str) -> bytes:
    return json.dumps({"weight_map": {f"tensor.{number}": file for number, file in enumerate(files)}}).encode()


SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": index("left.safetensors", "deep/er/right.safetensors"),
    "left.safetensors": b"left",
    "deep/er/right.safetensors": b"right",
}


def all_contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_shards_are_those_that_the_index_names(s3: Any, s3_server: str, tmp_path: Path) -> None:
    options = S3Options(endpoint_url=s3_server)
    others = {"model-00001-of-00001.safetensors": b"old", "deep/other.safetensors": b"!", "pytorch_model.bin": b"!"}
    upload(s3, "x", SHARDED | others)
    folder = resolve_checkpoint("s3://bucket/x", tmp_path, options)
    assert all_contents(folder) == SHARDED
    assert listed_identity("s3://bucket/x", options, time.monotonic() + 60) == downloaded_identity(folder)

    before = {path: path.stat().st_ino for path in folder.rglob("*.safetensors")}
    upload(s3, "x", {"left.safetensors": b"LEFT"})
    resolve_checkpoint("s3://bucket/x", tmp_path, options)
    assert all_contents(folder) == SHARDED | {"left.safetensors": b"LEFT"}
    assert {path for path, inode in before.items() if path.stat().st_ino == inode} == {
        folder / "deep/er/right.safetensors"
    }

    moved = {"model.safetensors.index.json": index("left.safetensors")}
    upload(s3, "x", moved)
    resolve_checkpoint("s3://bucket/x", tmp_path, options)
    assert all_contents(folder) == {"config.json": b"{}", "left.safetensors": b"LEFT", **moved}

    upload(s3, "x", {"model.safetensors": b"one"})
    resolve_checkpoint("s3://bucket/x", tmp_path, options)
    assert all_contents(folder) == {"config.json": b"{}", "model.safetensors": b"one"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a weight index: it is not JSON"),
        (b'{"weight_map": {}}', "is not a weight index: it needs a 'weight_map'"),
        (
            index("../left.safetensors"),
            r"names '\.\./left\.safetensors', which is no name of a file in the checkpoint",
        ),
        (index("left.safetensors", "gone.safetensors"), r"names 'gone\.safetensors', which is not there"),
        (index(".snapcap-s3.json"), "names '.snapcap-s3.json', which is no name of a file"),
    ],
)
def test_an_index_that_cannot_be_followed_is_one_line(
    s3: Any, s3_server: str, tmp_path: Path, content: bytes, says: str
) -> None:
    upload(s3, "x", SHARDED | {"model.safetensors.index.json": content})
    upload(s3, "", {"left.safetensors": b"of another"})
    with pytest.raises(CheckpointError, match=says) as caught:
        resolve_checkpoint("s3://bucket/x", tmp_path, S3Options(endpoint_url=s3_server))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_adapter_is_refused_and_how_to_merge_it_said(s3: Any, s3_server: str, tmp_path: Path) -> None:
    adapter = {"adapter_config.json": b'{"base_model_name_or_path": "me/base"}', "adapter_model.safetensors": b"!"}
    upload(s3, "adapter", adapter)
    folder = folder_with(tmp_path / "adapter", adapter)
    advice = r"a PEFT adapter of .*merge_and_unload\(\)\.save_pretrained\('merged'\)"
    with pytest.raises(CheckpointError, match=advice):
        resolve_checkpoint("s3://bucket/adapter", tmp_path, S3Options(endpoint_url=s3_server))
    with pytest.raises(CheckpointError, match=f"adapter of 'me/base'.*{advice[20:]}"):
        resolve_checkpoint(str(folder), tmp_path, S3Options())
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=r"where the weights are merged already, remove adapter_config\.json"):
        resolve_checkpoint(str(folder), tmp_path, S3Options())
    for content in (b"[]", b"{", b'{"base_model_name_or_path": 7}', b'{"base_model_name_or_path": "a\\u001b[2J"}'):
        (folder / "adapter_config.json").write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            resolve_checkpoint(str(folder), tmp_path, S3Options())
        assert str(caught.value).isprintable()


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
    if kind in ("silent", "refused"):
        with reserved_port() as reserved:
            if kind == "silent":
                reserved.listen()
            yield f"http://127.0.0.1:{reserved.getsockname()[1]}"
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
        known = s3_checkpoint.download_folder(source, tmp_path, down)
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


@pytest.mark.parametrize("name", [".", "config.json", "adapter_config.json"])
def test_what_may_not_be_read_is_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path / "model", SAFE | {"adapter_config.json": b"{}"} if "adapter" in name else SAFE)
    with denied(folder / name):
        if name == "config.json":  # it is there; who reads it says so
            assert local_folder(str(folder)) == folder
            with pytest.raises(ConfigError, match=f"{folder / name} cannot be read: Permission denied"):
                ModelConfig.from_folder(folder)
            return
        with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as caught:
            local_folder(str(folder))
    assert str(folder) in str(caught.value)
    with denied(tmp_path), pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        local_folder(str(folder))


def test_two_starts_that_update_a_folder_end_at_the_same_moment(
    s3: Any, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = S3Options(endpoint_url=s3_server)
    upload(s3, "same", SAFE)
    folder = resolve_checkpoint("s3://bucket/same", tmp_path, options)
    upload(s3, "same", {"config.json": b'{"a": 1}'})
    exists = Path.exists

    def and_then_removed(path: Path, **more: Any) -> bool:
        found = exists(path, **more)
        if found and path.name == ".snapcap-s3.partial":
            path.unlink()  # by the other start
        return found

    monkeypatch.setattr(Path, "exists", and_then_removed)
    assert resolve_checkpoint("s3://bucket/same", tmp_path, options) == folder
    assert contents(folder) == SAFE | {"config.json": b'{"a": 1}'}
