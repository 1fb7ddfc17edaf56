"""Checkpoints of the hub, from a small server of its protocol, in subprocesses: the client reads variables once."""

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
from urllib.parse import unquote

import pytest
from support.checkpoints.checkpoint_files import SAFE, contents
from support.servers.server_process import reserved_port
from support.servers.small_disk import SMALL

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
    "me/sharded": {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "[l]eft.safetensors", "b": "deep/right.safetensors"}}
        ).encode(),
        "[l]eft.safetensors": b"left",
        "left.safetensors": b"another",
        "deep/right.safetensors": b"right",
        "model-00001-of-00001.safetensors": b"old",
        "pytorch_model.bin": b"old",
        "evil.py": b"raise SystemExit",
    },
    "me/pickled-sharded": {
        "config.json": b"{}",
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "consolidated.pth"}}',
        "consolidated.pth": b"old",
    },
    "me/traversal": {
        "config.json": b"{}",
        "model.safetensors.index.json": b'{"weight_map": {"a": "../../secret"}}',
    },
    "me/adapter": {"adapter_config.json": b'{"base_model_name_or_path": "me/safe"}', "adapter_model.bin": b"!"},
    "me/described": SAFE | {"preprocessor_config.json": b"{}", "generation_config.json": b"{}"},
    "me/large": SAFE | {"model.safetensors": bytes(2 * SMALL)},
}
TOKENS = {"me/secret": "hf_right"}
HUB |= dict.fromkeys(TOKENS, SAFE)
REFUSED = {"me/gated": (403, "GatedRepo"), "me/private": (401, "RepoNotFound"), "me/broken": (418, "")}


class HubHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, kind, revision, *rest = [*(parts[2:] if is_api else parts), "", ""]
        repository = f"{owner}/{name}"
        if is_api and not kind:  # of the default branch
            kind, revision = "revision", "main"
        if repository in REFUSED:
            return self.reply(REFUSED[repository][0], b"", {"X-Error-Code": REFUSED[repository][1]})
        wanted = TOKENS.get(repository)
        shown = wanted is None or self.headers["Authorization"] == f"Bearer {wanted}"
        if repository not in HUB or not shown:
            return self.reply(404 if shown else 401, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", COMMIT):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = HUB[repository]
        if kind == "revision":
            siblings = [{"rfilename": n} for n in files]
            return self.reply_json({"id": repository, "sha": COMMIT, "siblings": siblings})
        if kind == "tree":
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": f"{n}-oid".replace("/", "-")}
                for n, c in files.items()
            ]
            return self.reply_json(tree)
        file = unquote("/".join(part for part in rest if part))
        return self.reply(200, files[file], {"ETag": f'"{file}-oid"'.replace("/", "-"), "X-Repo-Commit": COMMIT})

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


def resolve_from_hub(sources: list[str], home: Path, before: str = "", **environment: str) -> list[str]:
    """What each source resolves to: a folder, or the text of the CheckpointError; and before it what is logged.

    `before`: code that is run first.
    """
    code = (
        "import sys; from pathlib import Path\n"
        f"{before}"
        "from snapcap.warmup.checkpoints.local import CheckpointError\n"
        "from snapcap.warmup.checkpoints.source import resolve_checkpoint\n"
        "from snapcap.warmup.options import S3Options\n"
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
    (too,) = resolve_from_hub(["me/none"], tmp_path, HF_ENDPOINT=hub, TRANSFORMERS_OFFLINE="yes")
    assert too == offline[2].replace("HF_HUB", "TRANSFORMERS")


@pytest.mark.parametrize("kind", ["refused", "silent", "no such host", "500", "403"])
def test_without_the_hub_a_whole_checkpoint_of_its_cache_is_used(kind: str, hub: str, tmp_path: Path) -> None:
    """Also one of a branch, of which only the hub can say where it is now."""
    known = resolve_from_hub(["me/safe", "me/safe@v1"], tmp_path, HF_ENDPOINT=hub)
    outage = (
        "import logging\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "logging.getLogger('huggingface_hub').setLevel('CRITICAL')\n"
        "from snapcap.warmup.checkpoints import hub\n"
        "hub.OUTAGE_S = 1.0\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        address = {"silent": silent, "no such host": "http://hub.invalid"}.get(kind, "http://127.0.0.1:9")
        if kind.isdigit():
            REFUSED["me/safe"] = int(kind), ""
            address = hub
        try:
            lines = resolve_from_hub(["me/safe", "me/safe@v1"], tmp_path, before=outage, HF_ENDPOINT=address)
        finally:
            REFUSED.pop("me/safe", None)
    assert [line for line in lines if line.startswith("/")] == known
    warnings = [line for line in lines if "does not answer; the copy on this disk is used" in line]
    assert len(warnings) == 2, lines


@pytest.mark.parametrize("source", ["me/described", "me/described@v1", f"me/described@{COMMIT}"])
def test_a_part_of_a_checkpoint_in_the_cache_is_completed(source: str, hub: str, tmp_path: Path) -> None:
    """Another program that reads the model alone leaves such a part, and so does a download that was cut."""
    part = (
        "from huggingface_hub import hf_hub_download\n"
        "for name in ('config.json', 'model.safetensors'):\n"
        "    for revision in ('main', 'v1'):\n"
        "        hf_hub_download('me/described', name, revision=revision)\n"
    )
    (folder,) = resolve_from_hub([source], tmp_path, before=part, HF_ENDPOINT=hub)
    assert contents(Path(folder)) == HUB["me/described"]
    nowhere = resolve_from_hub([source], tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert nowhere[-1] == folder


def test_shards_are_those_that_the_index_names(hub: str, tmp_path: Path) -> None:
    sources = ["me/sharded", "me/sharded@v1", "me/pickled-sharded"]
    sharded, tagged, pickled = (Path(line) for line in resolve_from_hub(sources, tmp_path, HF_ENDPOINT=hub))
    wanted = ("config.json", "model.safetensors.index.json", "[l]eft.safetensors", "deep/right.safetensors")
    files = {path.relative_to(sharded).as_posix() for path in sharded.rglob("*") if path.is_file()}
    assert files == set(wanted)
    assert tagged == sharded
    assert contents(pickled) == HUB["me/pickled-sharded"]
    offline = resolve_from_hub(sources, tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert offline == [str(sharded), str(sharded), str(pickled)]


def test_what_the_hub_refuses_is_one_line_each(hub: str, tmp_path: Path) -> None:
    expected = {
        "me/none": "there is no such repository, or it is private; check the name, or set HF_TOKEN",
        "me/private": "there is no such repository, or it is private; check the name, or set HF_TOKEN",
        "me/gated": "access is gated; accept its terms on the hub and set HF_TOKEN",
        "me/safe@none": "there is no such revision; write owner/name@branch, @tag or @commit",
        "me/empty": "has no config.json",
        "me/traversal": "names '../../secret', which is no name of a file in the checkpoint",
        "me/adapter": "holds a PEFT adapter of 'me/safe' (adapter_config.json), which is not served; merge it",
        "me/broken": "",
        "not an id": "that is neither a folder nor a hub id; hub ids look like owner/name",
    }
    lines = resolve_from_hub(list(expected), tmp_path, HF_ENDPOINT=hub)
    assert len(lines) == len(expected)
    for line, (source, advice) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"'{source}'")
        assert advice in line


def test_the_token_of_the_environment_is_shown_to_the_hub(hub: str, tmp_path: Path) -> None:
    (folder,) = resolve_from_hub(["me/secret"], tmp_path, HF_ENDPOINT=hub, HF_TOKEN="hf_right")
    assert contents(Path(folder)) == SAFE
    (line,) = resolve_from_hub(["me/secret"], tmp_path, HF_ENDPOINT=hub, HF_HOME=str(tmp_path / "other"))
    assert line.endswith("or set HF_TOKEN")


def test_a_full_disk_is_named_and_nothing_counts(hub: str, small_disk: Path) -> None:
    (line,) = resolve_from_hub(["me/large"], small_disk, HF_ENDPOINT=hub)
    for word in ("'me/large'", str(small_disk), "No space left", "choose another folder (HF_HOME)"):
        assert word in line
    assert [path for path in small_disk.rglob("*model.safetensors") if path.exists()] == []


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    with reserved_port() as nobody:
        port = nobody.getsockname()[1]
        (line,) = resolve_from_hub(["me/safe"], tmp_path, HF_ENDPOINT=f"http://user:secret@127.0.0.1:{port}")
    assert "secret" not in line
    assert line.startswith(f"'me/safe' is not in the local cache and http://…@127.0.0.1:{port} cannot be reached (")
    assert "Connection refused" in line
    assert line.endswith("; check the network and HF_ENDPOINT, or give a folder")
