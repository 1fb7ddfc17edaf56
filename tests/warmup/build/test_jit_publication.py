"""Publishing what the jit backend compiled: only after a miss, to the folder at once, and to S3 where it may."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.fetch import Artifacts, Fetched, Result, fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.artifacts.remote import open_store
from snapcap.warmup.artifacts.signing import OWNER, Signer, Trust
from snapcap.warmup.artifacts.worker import publish_in_worker
from snapcap.warmup.options import ComputeOptions, ModelOptions, S3Options, StartOptions, StoreOptions
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import CacheCounts, StartupStatus
from snapcap.warmup.start.jit import PAYLOAD, CompileCache, Jit

JIT = {"kind": "jit", "format": 1}
KEY = artifact_key(JIT)
PLAN = Plan("cpu", "float32", (1,), 8, 1)


class Compiled(CompileCache):
    """A cache in which something was compiled."""

    content = b"payload"

    def restore(self, artifacts: Artifacts) -> int:
        return 1

    def save(self) -> dict[str, Path]:
        (self.folder / "cache.bin").write_bytes(self.content)
        return {PAYLOAD: self.folder / "cache.bin"}


@pytest.fixture
def options(tmp_path: Path) -> StartOptions:
    return StartOptions(ModelOptions(cache_dir=tmp_path), ComputeOptions(backend="jit"))


@pytest.fixture
def cache() -> Iterator[Compiled]:
    with Compiled.private({}) as cache:
        assert isinstance(cache, Compiled)
        yield cache


@pytest.fixture
def finish(cache: Compiled, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``finish(options, result, misses=…)``: what came of publishing in a start that looked for artifacts with this
    result and missed so often, and the counts of it."""

    def run(options: StartOptions, result: Result, misses: int) -> tuple[list[str], dict[tuple[str, ...], int]]:
        monkeypatch.setattr("snapcap.warmup.start.jit.cache_counts", lambda: CacheCounts(3, misses, 0))
        status = StartupStatus()
        jit = Jit(options, status, cache)
        jit.backend(PLAN, Artifacts(KEY, JIT, Fetched(result, "because")))
        results = [published.result for published in jit.publish().result(60)]
        return results, status.counts("artifact_publish")

    return run


def stored(options: StartOptions) -> Fetched:
    return fetch(None, FolderStore.open(options.store_folder), KEY, JIT, OWNER, 60)


def test_a_start_without_a_miss_publishes_nothing(finish: Any, options: StartOptions) -> None:
    assert finish(options, "hit", misses=0) == ([], {})
    assert stored(options).result == "miss"


@pytest.mark.parametrize("misses", [2, 0])  # 0: a remote cache had everything
def test_a_start_without_artifacts_publishes_to_the_folder(finish: Any, options: StartOptions, misses: int) -> None:
    assert finish(options, "miss", misses) == (["published"], {("published",): 1})
    found = stored(options)
    assert found.entries[PAYLOAD].read() == b"payload"
    assert found.manifest is not None
    assert (found.manifest.kind, found.manifest.factors) == ("jit", JIT)


@pytest.mark.parametrize(("result", "kept"), [("hit", b"new"), ("corrupt", b"new"), ("miss", b"payload")])
def test_a_set_that_lacked_something_is_replaced_and_another_start_s_is_not(
    finish: Any, options: StartOptions, cache: Compiled, result: Result, kept: bytes
) -> None:
    finish(options, "miss", misses=1)
    cache.content = b"new"
    finish(options, result, misses=1)
    assert stored(options).entries[PAYLOAD].read() == kept


def test_what_cannot_be_published_is_counted_and_serving_goes_on(
    finish: Any, options: StartOptions, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    unusable = replace(options, store=StoreOptions(str(tmp_path / "file" / "store")))
    assert finish(unusable, "miss", misses=1) == (["error"], {("error",): 1})
    bad_key = replace(options, store=replace(options.store, sign_key=tmp_path / "file"))
    assert finish(bad_key, "miss", misses=1) == (["error"], {("error",): 1})


def test_a_server_that_may_sign_publishes_to_s3_from_a_process_of_its_own(
    finish: Any, options: StartOptions, s3: Any, s3_server: str, tmp_path: Path, signer: Signer, trust: Trust
) -> None:
    s3_options = S3Options(endpoint_url=s3_server, region="us-east-1")
    store = replace(
        options.store, address="s3://bucket/a", sign_key=tmp_path / "key", trusted_keys=(tmp_path / "key.pub",)
    )
    signing = replace(options, store=store, s3=s3_options)
    assert finish(signing, "miss", misses=1) == (["published", "published"], {("published",): 2})
    assert finish(signing, "miss", misses=1) == (["exists", "exists"], {("exists",): 2})

    remote = open_store("s3://bucket/a", s3_options, trust)
    found = fetch(remote, FolderStore.open(tmp_path / "new"), KEY, JIT, trust, 60)
    assert (found.result, found.entries[PAYLOAD].read()) == ("hit", b"payload")

    unsigned = replace(signing, store=replace(store, sign_key=None))
    assert finish(unsigned, "miss", misses=1) == (["exists"], {("exists",): 1})  # the folder alone


def test_a_child_that_cannot_publish_says_why(
    options: StartOptions, s3: Any, s3_server: str, tmp_path: Path
) -> None:
    store = replace(options.store, address="s3://bucket/a", allow_unsigned=True)
    asked = replace(options, store=store, s3=S3Options(endpoint_url=s3_server, region="us-east-1"))
    nothing = publish_in_worker(KEY, asked, replace=False)
    assert nothing.result == "error"
    assert "no artifacts for key" in nothing.reason
    lost = replace(asked, store=replace(store, sign_key=tmp_path / "lost"))
    assert "cannot read the key" in publish_in_worker(KEY, lost, replace=False).reason
