"""The worker that fetches: what it brings is verified here again, and it cannot outstay its deadline."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapcap.models.json_object import from_json, to_json
from snapcap.warmup.artifacts import worker as store_worker
from snapcap.warmup.artifacts.fetch import Fetched
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import Difference, Factors, artifact_key
from snapcap.warmup.artifacts.manifest import Manifest
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.artifacts.store import StoreRefusedError, blob_name
from snapcap.warmup.artifacts.worker import Fetcher
from snapcap.warmup.machine.worker import Worker
from snapcap.warmup.options import FetchJob, ModelOptions, S3Options, StartOptions, StoreOptions

HIT = {
    "result": "hit",
    "reason": "trust me",
    "bytes_fetched": 1,
    "differences": [],
    "unasked": "",
}
ROOT = Path(__file__).parents[3]


class Job(NamedTuple):
    """Holds what a start asks the worker for."""

    options: StartOptions
    key: str
    factors: Factors


def job_at(store: StoreOptions, s3: S3Options, cache: Path, manifest: Manifest) -> Job:
    return Job(StartOptions(ModelOptions(cache_dir=cache), store=store, s3=s3), manifest.key, manifest.factors)


def trusting(job: Job, *keys: Path) -> Job:
    store = replace(job.options.store, trusted_keys=keys)
    return job._replace(options=replace(job.options, store=store))


def packages(job: Job, trust: Trust) -> Fetched:
    with closing(Fetcher(job.options)) as fetcher:
        return fetcher.packages(job.key, job.factors, trust)


@pytest.fixture
def job_for(tmp_path: Path, manifest: Manifest) -> Callable[[S3Store], Job]:
    """A job for ``manifest`` at a store, which trusts the test's signer."""

    def make(store: S3Store) -> Job:
        return job_at(
            StoreOptions(store.location, (tmp_path / "key.pub",), deadline=60),
            S3Options(endpoint_url=store.s3.meta.endpoint_url, region="us-east-1"),
            tmp_path / "cache",
            manifest,
        )

    return make


@pytest.fixture
def published(s3_store: S3Store, manifest: Manifest, files: dict[str, Path], signer: Signer) -> S3Store:
    assert publish(s3_store, manifest, files, signer).result == "published"
    return s3_store


def no_worker(*args: Any, **options: Any) -> None:
    raise AssertionError("a process was started")


def test_a_set_comes_through_the_worker(
    published: S3Store,
    job_for: Callable[[S3Store], Job],
    manifest: Manifest,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trust: Trust,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(9)")  # the worker must not import from where it is started
    fetched = packages(job_for(published), trust)
    assert fetched.result == "hit", fetched.reason
    assert fetched.manifest == manifest
    assert {name: file.read() for name, file in fetched.entries.items()} == {
        name: path.read_bytes() for name, path in files.items()
    }
    assert fetched.bytes_fetched == manifest.total_bytes
    assert published.location in fetched.reason
    monkeypatch.setattr(Worker, "start", no_worker)
    again = packages(job_for(published), trust)  # from the local folder
    assert (again.result, again.entries, again.bytes_fetched) == ("hit", fetched.entries, 0)


def test_the_server_imports_neither_boto3_nor_torch() -> None:
    code = (
        "import sys, snapcap.warmup.artifacts.worker;"
        "sys.exit(bool({'boto3', 'botocore', 'torch', 'cryptography', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_failures_come_through_with_their_differences(
    published: S3Store, job_for: Callable[[S3Store], Job], manifest: Manifest, trust: Trust
) -> None:
    factors = {**manifest.factors, "torch.version": "2.14.0"}
    stale = Job(job_for(published).options, artifact_key(factors), factors)
    fetched = packages(stale, trust)
    assert fetched.result == "stale"
    assert fetched.differences == (Difference("torch.version", "2.14.0", "2.13.0"),)
    job = job_for(published)
    fetched = packages(trusting(job), trust)
    assert (fetched.result, fetched.entries) == ("error", {})
    assert "--trusted-key" in fetched.reason
    missing = trusting(job, Path("/nowhere/key.pub"))
    assert "/nowhere/key.pub" in packages(missing, trust).reason


def test_what_the_worker_brought_is_verified_again(
    published: S3Store,
    job_for: Callable[[S3Store], Job],
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    trust: Trust,
) -> None:
    job = job_for(published)
    local = FolderStore.open(job.options.store_folder)

    class Damaging(Worker):
        def ask(self, task: Mapping[str, Any], limit: float) -> dict[str, Any]:
            answer = super().ask(task, limit)
            local.write(blob_name(manifest.entries["blocks.pt2"]), b"damage" * 1000)
            return answer

    monkeypatch.setattr(store_worker, "Worker", Damaging)
    fetched = packages(job, trust)
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
        json.dumps({**HIT, "result": "great"}),
        json.dumps({**HIT, "result": "miss", "differences": [{"surplus": 1}]}),
    ],
)
def test_a_worker_that_answers_nothing_sensible(
    answer: str, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    monkeypatch.setattr(sys, "executable", answering(tmp_path / "python", answer))
    job = job_at(StoreOptions("s3://bucket"), S3Options(), tmp_path / "cache", manifest)
    fetched = packages(job, trust)
    assert (fetched.result, fetched.entries) == ("error", {})
    assert "gave no answer" in fetched.reason


def test_a_worker_that_dies_is_told_by_its_end(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nread job\necho 'no memory' >&2\nexit 11\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    job = job_at(StoreOptions("s3://bucket"), S3Options(), tmp_path / "cache", manifest)
    assert "ended with status 11: no memory" in packages(job, trust).reason


def test_a_worker_that_claims_a_hit_is_not_believed(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    answer = json.dumps(HIT)
    monkeypatch.setattr(sys, "executable", answering(tmp_path / "python", answer))
    job = job_at(StoreOptions("s3://bucket"), S3Options(), tmp_path / "cache", manifest)
    fetched = packages(job, trust)
    assert (fetched.result, fetched.entries) == ("miss", {})


def test_a_black_hole_is_given_up_by_the_worker(
    aws_environment: None, black_hole: str, tmp_path: Path, manifest: Manifest, trust: Trust
) -> None:
    s3 = S3Options(endpoint_url=black_hole, region="us-east-1", read_timeout=60)
    job = job_at(StoreOptions("s3://bucket", allow_unsigned=True, deadline=0.5), s3, tmp_path / "cache", manifest)
    fetched = packages(job, trust)
    assert fetched.result == "error"
    assert "0.5 s" in fetched.reason
    assert fetched.seconds < 30  # and not 60


def test_a_worker_that_hangs_is_ended(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    pid = tmp_path / "pid"
    hanging = tmp_path / "python"
    hanging.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec sleep 1000\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(store_worker, "GRACE", 0.5)
    job = job_at(StoreOptions("s3://bucket", deadline=0.5), S3Options(), tmp_path / "cache", manifest)
    fetched = packages(job, trust)
    assert fetched.result == "error"
    assert "ended after 0.5 s" in fetched.reason
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_worker_that_cannot_start(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    job = job_at(StoreOptions("s3://bucket"), S3Options(), tmp_path / "cache", manifest)
    assert "cannot start" in packages(job, trust).reason


def test_an_unsafe_local_folder_is_refused(tmp_path: Path, manifest: Manifest, trust: Trust) -> None:
    (tmp_path / "cache" / "store").mkdir(parents=True)
    (tmp_path / "cache" / "store").chmod(0o777)
    job = job_at(StoreOptions("s3://bucket"), S3Options(), tmp_path / "cache", manifest)
    with pytest.raises(StoreRefusedError):
        packages(job, trust)


def test_jobs_survive_the_pipe(tmp_path: Path) -> None:
    job = FetchJob(
        StoreOptions(
            "s3://bucket/ü",
            (tmp_path / "a", tmp_path / "b"),
            allow_unsigned=True,
            min_built="2026-11-25T00:00:00+00:00",
            sign_key=tmp_path / "key",
            deadline=0.1,
            build="off",
        ),
        S3Options(endpoint_url="http://x", profile="p", read_timeout=1.5),
        tmp_path,
        "owner/name",
    )
    assert from_json(FetchJob, to_json(job)) == job


def test_only_a_worker_that_publishes_hears_of_the_key_that_signs(tmp_path: Path) -> None:
    options = StartOptions(store=StoreOptions("s3://bucket", (tmp_path / "a",), sign_key=tmp_path / "key"))
    assert FetchJob.of(options).store.sign_key is None
    assert FetchJob.of(options, signs=True).store.sign_key == tmp_path / "key"
