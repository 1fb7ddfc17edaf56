"""The files of a jit artifact set: nothing is given to torch that is not what the manifest names."""

import os
import zipfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapcap.warmup.artifacts.fetch import Artifacts, fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.artifacts.manifest import describe_all, new_manifest
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.signing import OWNER
from snapcap.warmup.artifacts.store import blob_name
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions, StoreOptions
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.start.jit import LIBRARIES, PAYLOAD, CompileCache, Jit, RestoreError

JIT = {"kind": "jit", "format": 1}
PLAN = Plan("cpu", "float32", (1,), 8, 1)


def info(*keys: str) -> Any:
    return SimpleNamespace(artifacts=defaultdict(list, {"inductor": list(keys)}))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch was given to load; it says that there were two graphs in it."""
    given: list[bytes] = []

    def load(data: bytes) -> Any:
        given.append(data)
        return info("a", "b")

    monkeypatch.setattr("torch.compiler.load_cache_artifacts", load)
    return given


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A folder with a jit set."""
    libraries = tmp_path / "libraries.zip"
    with zipfile.ZipFile(libraries, "w") as archive:
        archive.writestr("ab/cabc.main.so", b"library")
    (tmp_path / "cache.bin").write_bytes(b"payload")
    files = {PAYLOAD: tmp_path / "cache.bin", LIBRARIES: libraries}
    store = FolderStore.open(tmp_path / "store")
    assert publish(store, new_manifest("jit", JIT, describe_all(files)), files, None).result == "published"
    return store


def look(store: FolderStore) -> Artifacts:
    key = artifact_key(JIT)
    return Artifacts(key, JIT, fetch(None, store, key, JIT, OWNER, 60))


def payload(store: FolderStore) -> Path:
    return look(store).fetched.entries[PAYLOAD].path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def test_a_set_is_restored_into_a_folder_of_its_own(store: FolderStore, loaded: list[bytes]) -> None:
    with CompileCache.private({}) as cache:
        assert cache.restore(look(store)) == 2
        assert (cache.folder / "ab" / "cabc.main.so").read_bytes() == b"library"
    assert loaded == [b"payload"]
    assert not cache.folder.exists()


def test_the_folder_is_the_compilers_for_as_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with CompileCache.private({"MORE": "1"}) as cache, CompileCache.private({}) as other:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(other.folder) != str(cache.folder)
        assert os.environ["TRITON_CACHE_DIR"].startswith(str(other.folder))
        assert os.environ["MORE"] == "1"
        assert list(other.folder.iterdir()) == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    assert not {"TRITON_CACHE_DIR", "MORE"} & os.environ.keys()


@pytest.mark.parametrize("name", [PAYLOAD, LIBRARIES])
def test_a_flipped_byte_is_corrupt_and_never_given_to_torch(
    store: FolderStore, loaded: list[bytes], tmp_path: Path, name: str
) -> None:
    manifest = look(store).fetched.manifest
    assert manifest is not None
    flip(store.root / blob_name(manifest.entries[name]))
    artifacts = look(store)
    assert artifacts.fetched.result == "corrupt"
    with CompileCache.private({}) as cache:
        options = StartOptions(
            ModelOptions(cache_dir=tmp_path), ComputeOptions(backend="jit"), store=StoreOptions(str(store.root))
        )
        Jit(options, StartupStatus(), cache).backend(PLAN, artifacts)
    assert loaded == []


@pytest.mark.parametrize("name", [PAYLOAD, LIBRARIES])
def test_a_file_that_changes_after_it_was_verified_is_corrupt_and_never_given_to_torch(
    store: FolderStore, loaded: list[bytes], tmp_path: Path, name: str
) -> None:
    artifacts, status = look(store), StartupStatus()
    assert artifacts.hit
    flip(artifacts.fetched.entries[name].path)
    with CompileCache.private({}) as cache:
        options = StartOptions(
            ModelOptions(cache_dir=tmp_path), ComputeOptions(backend="jit"), store=StoreOptions(str(store.root))
        )
        Jit(options, status, cache).backend(PLAN, artifacts)
        assert list(cache.folder.iterdir()) == []
    assert loaded == []
    assert status.counts("artifact_requests") == {("jit", "corrupt"): 1}
    assert "has changed since it was verified" in status.to_dict()["artifacts"]["reason"]


def test_a_file_that_is_gone_or_missing_in_the_set_is_named(store: FolderStore, loaded: list[bytes]) -> None:
    artifacts = look(store)
    with CompileCache.private({}) as cache:
        payload(store).unlink()
        with pytest.raises(RestoreError, match=f"{PAYLOAD} cannot be read: No such file"):
            cache.restore(artifacts)
        artifacts = Artifacts("k", JIT, look(store).fetched)
        with pytest.raises(RestoreError, match=f"the artifact set has no {PAYLOAD}"):
            cache.restore(artifacts)
    assert loaded == []


def test_what_torch_cannot_read_is_named(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compiler.load_cache_artifacts", lambda _data: None)
    with CompileCache.private({}) as cache, pytest.raises(RestoreError, match=f"torch cannot read {PAYLOAD}"):
        cache.restore(look(store))


def test_saved_are_torchs_artifacts_and_all_libraries_as_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda: (b"payload", info("a")))
    saved = []
    for order in (("b/2.main.so", "a/1.so"), ("a/1.so", "b/2.main.so")):
        with CompileCache.private({}) as cache:
            for name in (*order, "a/1.cpp", "fxgraph/x"):
                path = cache.folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(name.encode())
            files = cache.save()
            saved.append({name: path.read_bytes() for name, path in files.items()})
            with zipfile.ZipFile(files[LIBRARIES]) as archive:
                assert archive.namelist() == ["a/1.so", "b/2.main.so"]
                assert archive.read("b/2.main.so") == b"b/2.main.so"
    assert saved[0] == saved[1]
    assert saved[0][PAYLOAD] == b"payload"


def test_nothing_is_saved_that_was_restored(
    store: FolderStore, loaded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompileCache.private({}) as cache:
        cache.restore(look(store))
        for keys, wanted in (("a",), set()), (("a", "b"), set()), (("a", "c"), {PAYLOAD, LIBRARIES}):
            monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda keys=keys: (b"p", info(*keys)))
            assert set(cache.save()) == wanted
        monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda: None)
        assert cache.save() == {}
