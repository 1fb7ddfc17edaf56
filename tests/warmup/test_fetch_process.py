"""The child that fetches: what it brings is verified here again, and it cannot outstay its deadline."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.key import Difference, artifact_key
from snapcap.warmup.artifacts.manifest import Manifest
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.machine.child import Child
from snapcap.warmup.options import S3Options
from snapcap.warmup.store import fetch_worker as fetch_process
from snapcap.warmup.store.fetch_worker import FetchRequest, fetch_in_child
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.publish import publish
from snapcap.warmup.store.s3 import S3Store
from snapcap.warmup.store.store import StoreRefusedError, blob_name

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def request_for(tmp_path: Path, manifest: Manifest) -> Callable[[S3Store], FetchRequest]:
    """A request for ``manifest`` at a store, which trusts the test's signer."""

    def make(store: S3Store) -> FetchRequest:
        return FetchRequest(
            store=store.location,
            local=tmp_path / "local",
            key=manifest.key,
            factors=manifest.factors,
            s3=S3Options(endpoint_url=store.s3.meta.endpoint_url, region="us-east-1"),
            trusted_keys=(tmp_path / "key.pub",),
            deadline=60,
        )

    return make


@pytest.fixture
def published(s3_store: S3Store, manifest: Manifest, files: dict[str, Path], signer: Signer) -> S3Store:
    assert publish(s3_store, manifest, files, signer).result == "published"
    return s3_store


def no_child(*args: Any, **options: Any) -> None:
    raise AssertionError("a child process was started")


def test_a_set_comes_through_the_child(
    published: S3Store,
    request_for: Callable[[S3Store], FetchRequest],
    manifest: Manifest,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trust: Trust,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(9)")  # the child must not import from where it is started
    fetched = fetch_in_child(request_for(published), trust)
    assert fetched.result == "hit", fetched.reason
    assert fetched.manifest == manifest
    assert {name: file.read() for name, file in fetched.entries.items()} == {
        name: path.read_bytes() for name, path in files.items()
    }
    assert fetched.bytes_fetched == manifest.total_bytes
    assert published.location in fetched.reason
    monkeypatch.setattr(fetch_process, "Child", no_child)
    again = fetch_in_child(request_for(published), trust)  # from the local folder
    assert (again.result, again.entries, again.bytes_fetched) == ("hit", fetched.entries, 0)


def test_the_server_imports_neither_boto3_nor_torch() -> None:
    code = (
        "import sys, snapcap.warmup.store.fetch_worker;"
        "sys.exit(bool({'boto3', 'botocore', 'torch', 'cryptography', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_failures_come_through_with_their_differences(
    published: S3Store, request_for: Callable[[S3Store], FetchRequest], manifest: Manifest, trust: Trust
) -> None:
    factors = {**manifest.factors, "torch.version": "2.14.0"}
    stale = replace(request_for(published), factors=factors, key=artifact_key(factors))
    fetched = fetch_in_child(stale, trust)
    assert fetched.result == "stale"
    assert fetched.differences == (Difference("torch.version", "2.14.0", "2.13.0"),)
    untrusted = replace(request_for(published), trusted_keys=())
    fetched = fetch_in_child(untrusted, trust)
    assert (fetched.result, fetched.entries) == ("error", {})
    assert "--trusted-key" in fetched.reason
    missing = replace(request_for(published), trusted_keys=(Path("/nowhere/key.pub"),))
    assert "/nowhere/key.pub" in fetch_in_child(missing, trust).reason


def test_what_the_child_brought_is_verified_again(
    published: S3Store,
    request_for: Callable[[S3Store], FetchRequest],
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    trust: Trust,
) -> None:
    request = request_for(published)
    local = FolderStore.open(request.local)

    class Damaging(Child):
        def ask(self, task: Mapping[str, Any], limit: float) -> dict[str, Any]:
            answer = super().ask(task, limit)
            local.write(blob_name(manifest.entries["blocks.pt2"]), b"damage" * 1000)
            return answer

    monkeypatch.setattr(fetch_process, "Child", Damaging)
    fetched = fetch_in_child(request, trust)
    assert (fetched.result, fetched.entries, fetched.manifest) == ("corrupt", {}, None)
    assert "blocks.pt2" in fetched.reason


def answering(path: Path, answer: str) -> str:
    """A program that answers so to whatever it is asked, and ends with status 11."""
    path.write_text(f"#!/bin/sh\nread job\necho '{{\"started\": true}}'\nread task\necho '{answer}'\nexit 11\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        '{"result": "great", "reason": "", "bytes_fetched": 0, "differences": []}',
        '{"result": "miss", "reason": "", "bytes_fetched": 0, "differences": [{"surplus": 1}]}',
    ],
)
def test_a_child_that_answers_nothing_sensible(
    answer: str, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    monkeypatch.setattr(sys, "executable", answering(tmp_path / "python", answer))
    request = FetchRequest("s3://bucket", tmp_path / "local", manifest.key, manifest.factors, S3Options())
    fetched = fetch_in_child(request, trust)
    assert (fetched.result, fetched.entries) == ("error", {})
    assert "gave no answer" in fetched.reason


def test_a_child_that_dies_is_told_by_its_end(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nread job\necho 'no memory' >&2\nexit 11\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    request = FetchRequest("s3://bucket", tmp_path / "local", manifest.key, manifest.factors, S3Options())
    assert "ended with status 11: no memory" in fetch_in_child(request, trust).reason


def test_a_child_that_claims_a_hit_is_not_believed(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    answer = json.dumps({"result": "hit", "reason": "trust me", "bytes_fetched": 1, "differences": []})
    monkeypatch.setattr(sys, "executable", answering(tmp_path / "python", answer))
    request = FetchRequest("s3://bucket", tmp_path / "local", manifest.key, manifest.factors, S3Options())
    fetched = fetch_in_child(request, trust)
    assert (fetched.result, fetched.entries) == ("miss", {})


def test_a_black_hole_is_given_up_by_the_child(
    aws_environment: None, black_hole: str, tmp_path: Path, manifest: Manifest, trust: Trust
) -> None:
    s3 = S3Options(endpoint_url=black_hole, region="us-east-1", read_timeout=60)
    request = FetchRequest(
        "s3://bucket", tmp_path / "local", manifest.key, manifest.factors, s3, allow_unsigned=True, deadline=0.5
    )
    fetched = fetch_in_child(request, trust)
    assert fetched.result == "error"
    assert "0.5 s" in fetched.reason
    assert fetched.seconds < 30  # and not 60


def test_a_child_that_hangs_is_ended(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    pid = tmp_path / "pid"
    hanging = tmp_path / "python"
    hanging.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec sleep 1000\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(fetch_process, "_GRACE", 0.5)
    request = FetchRequest(
        "s3://bucket", tmp_path / "local", manifest.key, manifest.factors, S3Options(), deadline=0.5
    )
    fetched = fetch_in_child(request, trust)
    assert fetched.result == "error"
    assert "ended after 0.5 s" in fetched.reason
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_child_that_cannot_start(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    request = FetchRequest("s3://bucket", tmp_path / "local", manifest.key, manifest.factors, S3Options())
    assert "cannot start" in fetch_in_child(request, trust).reason


def test_an_unsafe_local_folder_is_refused(tmp_path: Path, manifest: Manifest, trust: Trust) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local").chmod(0o777)
    request = FetchRequest("s3://bucket", tmp_path / "local", manifest.key, manifest.factors, S3Options())
    with pytest.raises(StoreRefusedError):
        fetch_in_child(request, trust)


def test_requests_survive_the_pipe(tmp_path: Path, manifest: Manifest) -> None:
    request = FetchRequest(
        store="s3://bucket/ü",
        local=tmp_path,
        key=manifest.key,
        factors=manifest.factors,
        s3=S3Options(endpoint_url="http://x", profile="p", read_timeout=1.5),
        trusted_keys=(tmp_path / "a", tmp_path / "b"),
        allow_unsigned=True,
        deadline=time.get_clock_info("monotonic").resolution,
    )
    assert FetchRequest.from_json(request.to_json()) == request
