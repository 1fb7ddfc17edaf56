"""A key that is no longer trusted: what it signed is not loaded from anywhere, however warm the cache is."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.fetch import Fetched, fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.artifacts.manifest import Manifest, VerifiedFile, describe_all, new_manifest, seal
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.signing import OWNER, Signer, Trust, generate_key, load_signer
from snapcap.warmup.artifacts.store import ArtifactStore, manifest_name
from snapcap.warmup.artifacts.worker import Fetcher, publish_in_worker
from snapcap.warmup.build.builder import Built
from snapcap.warmup.build.release import publish_built, publish_jit
from snapcap.warmup.option import parse_moment
from snapcap.warmup.options import ModelOptions, S3Options, StartOptions, StoreOptions
from snapcap.warmup.start.jit import PAYLOAD

JIT = {"kind": "jit", "format": 1}


@pytest.fixture
def successor(tmp_path: Path) -> Signer:
    """Key B, whose public half is ``tmp_path / "b.pub"``."""
    generate_key(tmp_path / "b")
    return load_signer(tmp_path / "b")


@pytest.fixture
def revoked(tmp_path: Path, successor: Signer) -> Trust:
    """The trust after ``signer``'s key was replaced by B."""
    return Trust.of(StoreOptions(trusted_keys=(tmp_path / "b.pub",)))


@pytest.fixture(params=["aot", "jit"])
def a_set(request: pytest.FixtureRequest, files: dict[str, Path], factors: dict[str, Any]) -> Manifest:
    return new_manifest(request.param, factors | {"kind": request.param}, describe_all(files))


@pytest.fixture
def options(tmp_path: Path, s3: Any, s3_server: str, successor: Signer) -> StartOptions:
    """A server that trusts B, with an empty bucket."""
    store = StoreOptions("s3://bucket/store", trusted_keys=(tmp_path / "b.pub",))
    return StartOptions(
        ModelOptions(cache_dir=tmp_path), store=store, s3=S3Options(endpoint_url=s3_server, region="us-east-1")
    )


def get(remote: ArtifactStore | None, local: FolderStore, trust: Trust, manifest: Manifest) -> Fetched:
    return fetch(remote, local, manifest.key, manifest.factors, trust, 60)


def checked(files: dict[str, Path]) -> dict[str, VerifiedFile]:
    """As a build has them."""
    return {name: VerifiedFile.of(path) for name, path in files.items()}


def assert_untrusted(fetched: Fetched) -> None:
    assert fetched.result == "untrusted", fetched.reason
    assert (fetched.entries, fetched.manifest) == ({}, None)
    assert "--trusted-key" in fetched.reason


def test_a_warm_cache_knows_no_revoked_key(
    store: ArtifactStore,
    local: FolderStore,
    a_set: Manifest,
    files: dict[str, Path],
    signer: Signer,
    trust: Trust,
    successor: Signer,
    revoked: Trust,
) -> None:
    assert publish(store, a_set, files, signer).result == "published"
    assert get(store, local, trust, a_set).result == "hit"
    assert get(None, local, trust, a_set).result == "hit"
    assert_untrusted(get(None, local, revoked, a_set))
    assert_untrusted(get(store, local, revoked, a_set))
    assert get(None, local, trust, a_set).result == "hit", "another server may trust it"

    store.delete(manifest_name(a_set.key))
    assert_untrusted(get(store, local, revoked, a_set))
    assert publish(store, a_set, files, successor, replace=True).result == "published"
    fetched = get(store, local, revoked, a_set)
    assert (fetched.result, fetched.bytes_fetched) == ("hit", 0)
    assert get(None, local, revoked, a_set).result == "hit"
    assert_untrusted(get(None, local, trust, a_set))


def test_an_older_set_that_was_put_back_is_refused(
    store: ArtifactStore,
    local: FolderStore,
    a_set: Manifest,
    files: dict[str, Path],
    signer: Signer,
    trust: Trust,
) -> None:
    """By someone who may write to the store and kept what the key's owner once signed."""
    older = replace(a_set, created="2026-03-01T12:00:00+00:00")
    demanding = replace(trust, min_built=parse_moment("2026-03-01T12:00:01Z"))
    assert publish(store, older, files, signer).result == "published"
    fetched = get(store, local, demanding, a_set)
    assert (fetched.result, fetched.manifest, fetched.unusable) == ("untrusted", None, True)
    assert "built at 2026-03-01T12:00:00+00:00, before --min-built 2026-03-01T12:00:01+00:00" in fetched.reason
    assert get(store, local, replace(trust, min_built=parse_moment("2026-03-01T12:00Z")), a_set).result == "hit"
    assert get(None, local, demanding, a_set).result == "untrusted", "the cache is warm now"

    assert publish(store, a_set, files, signer, replace=True).result == "published"
    assert get(store, local, demanding, a_set).result == "hit"
    assert publish(store, older, files, signer, replace=True).result == "published"
    assert get(store, local, demanding, a_set).result == "hit", "the newer one is in the cache"


def test_a_set_of_the_future_is_refused_where_age_matters(
    store: ArtifactStore,
    local: FolderStore,
    a_set: Manifest,
    files: dict[str, Path],
    signer: Signer,
    trust: Trust,
) -> None:
    """A builder whose clock was ahead has signed it, and it would outlast each --min-built."""
    ahead = replace(a_set, created="2199-03-01T12:00:00+00:00")
    assert publish(store, ahead, files, signer).result == "published"
    fetched = get(store, local, replace(trust, min_built=parse_moment("2026-03-01")), a_set)
    assert (fetched.result, fetched.manifest) == ("untrusted", None)
    assert "2199-03-01T12:00:00+00:00, which is in the future" in fetched.reason
    assert get(store, local, trust, a_set).result == "hit"


def test_what_the_owner_built_long_ago_is_refused_too(
    local: FolderStore, manifest: Manifest, files: dict[str, Path], trust: Trust
) -> None:
    older = replace(manifest, created="2026-03-01T12:00:00+00:00")
    local.vouch(seal(older, None))
    assert publish(local, older, files, None).result == "published"
    for demanding in (trust, Trust(), OWNER):
        assert get(None, local, demanding, manifest).result == "hit"
        fetched = get(None, local, replace(demanding, min_built=parse_moment("2026-03-02")), manifest)
        assert (fetched.result, "--min-built 2026-03-02" in fetched.reason) == ("untrusted", True)


def test_a_stranger_s_and_an_unsigned_set_of_the_cache_are_not_the_owner_s(
    local: FolderStore, manifest: Manifest, files: dict[str, Path], trust: Trust, successor: Signer
) -> None:
    """However they came there: from a time when anything was accepted, or by copying a bucket."""
    for signer, said in ((successor, successor.key_id), (None, "--sign-key")):
        assert publish(local, manifest, files, signer, replace=True).result == "published"
        fetched = get(None, local, trust, manifest)
        assert fetched.result == "untrusted"
        assert said in fetched.reason
        assert str(local.root) in fetched.reason
        assert get(None, local, Trust(), manifest).result == "hit"
        assert get(None, local, OWNER, manifest).result == "hit"
        assert get(None, local, replace(trust, allow_unsigned=True), manifest).result == "hit"


def test_what_was_built_here_needs_no_signature(
    options: StartOptions, files: dict[str, Path], manifest: Manifest, revoked: Trust
) -> None:
    built = Built(checked(files), {}, {}, complete=True)
    (made,) = publish_built(built, manifest.factors, options, to_remote=False, found=Fetched("miss", ""))
    assert made.result == "published"
    local = FolderStore.open(options.store_folder)
    assert get(None, local, revoked, manifest).result == "hit"


def test_a_build_takes_the_place_of_what_is_not_trusted(
    options: StartOptions, files: dict[str, Path], manifest: Manifest, signer: Signer, revoked: Trust
) -> None:
    local = FolderStore.open(options.store_folder)
    assert publish(local, manifest, files, signer).result == "published"
    for hidden in (get(None, local, revoked, manifest), Fetched("error", "the store did not answer")):
        built = Built(checked(files), {}, {}, complete=True)
        (made,) = publish_built(built, manifest.factors, options, to_remote=False, found=hidden)
        assert made.result == "published", made.reason
        assert get(None, local, revoked, manifest).result == "hit"


def test_a_fetched_set_does_not_become_the_owner_s_by_a_build_that_finds_it(
    options: StartOptions, files: dict[str, Path], manifest: Manifest, signer: Signer, trust: Trust, revoked: Trust
) -> None:
    """`snapcap build` publishes to the remote store what is at hand."""
    local = FolderStore.open(options.store_folder)
    local.write(manifest_name(manifest.key), seal(manifest, signer))
    publish(local, manifest, files, signer, replace=True)
    found = get(None, local, trust, manifest)
    assert found.result == "hit"
    built = Built(found.entries, {}, {}, complete=True)
    assert publish_built(built, manifest.factors, options, False, found)[0].result == "exists"
    assert_untrusted(get(None, local, revoked, manifest))


@pytest.mark.parametrize("signs", [False, True])
def test_what_jit_makes_from_another_s_set_does_not_outlive_the_trust_in_it(
    signs: bool,
    options: StartOptions,
    tmp_path: Path,
    files: dict[str, Path],
    signer: Signer,
    trust: Trust,
    revoked: Trust,
) -> None:
    store = replace(
        options.store, trusted_keys=(tmp_path / "key.pub",), sign_key=tmp_path / "key" if signs else None
    )
    options = replace(options, store=store)
    local, made = FolderStore.open(options.store_folder), {PAYLOAD: files["blocks.pt2"]}
    theirs = new_manifest("jit", JIT, describe_all(made))
    assert publish(local, theirs, made, signer).result == "published"
    found = get(None, local, trust, theirs)
    assert found.result == "hit"
    made[PAYLOAD].write_bytes(b"their graphs and ours")
    assert publish_jit(made, JIT, options, found).result == ("published" if signs else "exists")
    again = get(None, local, trust, theirs)
    assert (again.result, again.manifest == theirs) == ("hit", not signs)
    assert_untrusted(get(None, local, revoked, theirs))


def test_a_package_that_changed_after_its_self_check_is_not_published(
    options: StartOptions, files: dict[str, Path], manifest: Manifest
) -> None:
    built = Built(checked(files), {}, {}, complete=True)
    files["blocks.pt2"].write_bytes(b"other code")
    (made,) = publish_built(built, manifest.factors, options, to_remote=False, found=Fetched("miss", ""))
    assert made.result == "error"
    assert "blocks.pt2" in made.reason


def test_nobody_signs_for_a_set_that_is_not_trusted(
    options: StartOptions, tmp_path: Path, files: dict[str, Path], signer: Signer
) -> None:
    local = FolderStore.open(options.store_folder)
    theirs = new_manifest("jit", JIT, describe_all(files))
    assert publish(local, theirs, files, signer).result == "published"
    signing = replace(options, store=replace(options.store, sign_key=tmp_path / "b"))
    published = publish_in_worker(artifact_key(JIT), signing, replace=False)
    assert published.result == "error"
    assert "--trusted-key" in published.reason


def test_the_parent_of_the_process_that_fetches_trusts_no_more_than_it(
    options: StartOptions, files: dict[str, Path], manifest: Manifest, signer: Signer, trust: Trust, revoked: Trust
) -> None:
    local = FolderStore.open(options.store_folder)
    assert publish(local, manifest, files, signer).result == "published"
    with closing(Fetcher(options)) as fetcher:
        assert fetcher.packages(manifest.key, manifest.factors, trust).result == "hit"
        assert_untrusted(fetcher.packages(manifest.key, manifest.factors, revoked))
