"""Where checkpoints come from: the demo, folders, S3 and the hub, each from a real server or folder."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import models
from warmup.checkpoint import CheckpointError, S3Options, resolve_checkpoint

SAFE = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def folder_with(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


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
        "import sys; from pathlib import Path; from warmup.checkpoint import S3Options, resolve_checkpoint\n"
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


def test_a_cache_that_cannot_be_written_is_named(s3: Any, s3_server: str, tmp_path: Path) -> None:
    upload(s3, "x", SAFE)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot write to .*cache: .*; choose another cache folder"):
        resolve_checkpoint("s3://bucket/x", tmp_path / "cache", S3Options(endpoint_url=s3_server))


# --- the hub, as a small server of its protocol; in a subprocess, for the library reads its environment once

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB: dict[str, dict[str, bytes]] = {
    "me/safe": SAFE | {"pytorch_model.bin": b"old", "README.md": b"#", "flax_model.msgpack": b"!"},
    "me/pickled": {
        "config.json": b"{}",
        "vocab.json": b"{}",
        "pytorch_model.bin": b"old",
        "training_args.bin": b"!",
    },
    "me/empty": {"README.md": b"#"},
}
REFUSED = {"me/gated": (403, "GatedRepo"), "me/private": (401, "RepoNotFound"), "me/broken": (418, "")}


class HubHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, kind, revision, *rest = [*(parts[2:] if is_api else parts), "", ""]
        repository = f"{owner}/{name}"
        if repository in REFUSED:
            return self.reply(REFUSED[repository][0], b"", {"X-Error-Code": REFUSED[repository][1]})
        if repository not in HUB:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", COMMIT):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = HUB[repository]
        if kind == "revision":
            siblings = [{"rfilename": n} for n in files]
            return self.reply_json({"id": repository, "sha": COMMIT, "siblings": siblings})
        if kind == "tree":
            tree = [{"type": "file", "path": n, "size": len(c), "oid": f"{n}-oid"} for n, c in files.items()]
            return self.reply_json(tree)
        content = files[rest[0]]
        return self.reply(200, content, {"ETag": f'"{rest[0]}-oid"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET  # noqa: N815 - the name that the base class looks for

    def reply_json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for field, value in headers.items():
            self.send_header(field, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def resolve_from_hub(sources: list[str], home: Path, **environment: str) -> list[str]:
    """What each source resolves to: a folder, or the text of the CheckpointError."""
    code = (
        "import sys; from pathlib import Path\n"
        "from warmup.checkpoint import CheckpointError, S3Options, resolve_checkpoint\n"
        "for source in sys.argv[1:]:\n"
        "    try: print(resolve_checkpoint(source, Path('unused'), S3Options()))\n"
        "    except CheckpointError as error: print(error)\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    fixed = {
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *sources],
        env=inherited | fixed | environment,
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_hub_id_becomes_a_folder_also_offline(hub: str, tmp_path: Path) -> None:
    sources = ["me/safe", "me/safe@v1", "me/pickled"]
    safe, tagged, pickled = (Path(line) for line in resolve_from_hub(sources, tmp_path, HF_ENDPOINT=hub))
    assert contents(safe) == contents(tagged) == SAFE
    assert contents(pickled) == {n: c for n, c in HUB["me/pickled"].items() if n != "training_args.bin"}

    offline = resolve_from_hub(["me/safe", "me/pickled", "me/none"], tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert offline[:2] == [str(safe), str(pickled)]
    assert offline[2] == "'me/none' is not in the local cache and HF_HUB_OFFLINE is set; unset it, or give a folder"


def test_what_the_hub_refuses_is_one_line_each(hub: str, tmp_path: Path) -> None:
    expected = {
        "me/none": "there is no such repository, or it is private; check the name, or set HF_TOKEN",
        "me/private": "there is no such repository, or it is private; check the name, or set HF_TOKEN",
        "me/gated": "access is gated; accept its terms on the hub and set HF_TOKEN",
        "me/safe@none": "there is no such revision; write owner/name@branch, @tag or @commit",
        "me/empty": "has no config.json",
        "me/broken": "",
        "not an id": "that is neither a folder nor a hub id; hub ids look like owner/name",
    }
    lines = resolve_from_hub(list(expected), tmp_path, HF_ENDPOINT=hub)
    assert len(lines) == len(expected)
    for line, (source, advice) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"'{source}'")
        assert advice in line


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    lines = resolve_from_hub(["me/safe"], tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    assert lines == [
        "'me/safe' is not in the local cache and the hub cannot be reached; check the network, or give a folder"
    ]
