"""Descriptions of fetched models have a bound in a cache, and only what was fetched is removed."""

import os
from pathlib import Path

import pytest

from snapcap.service.config.models import MOST_MODELS
from snapcap.warmup.artifacts.download import mark_used, prune_models
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.store import MODEL_FILES, MODELS


@pytest.fixture
def cache(local: FolderStore) -> FolderStore:
    """With seventy manifests and folders of small files, each newer than the one before."""
    for number in range(70):
        data = f"manifest {number}".encode()
        local.write(f"{MODELS}/{number:064x}.json", data)
        folder = files(local, number)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        for path in (local.path(f"{MODELS}/{number:064x}.json"), folder):
            os.utime(path, (number, number))
    return local


def files(cache: FolderStore, number: int) -> Path:
    return cache.root / MODEL_FILES / f"{number:064x}"


def there(cache: FolderStore) -> tuple[list[int], list[int]]:
    """The numbers of manifests, and of folders of small files."""
    manifests = [int(path.stem, 16) for path in (cache.root / MODELS).glob("0*.json")]
    return sorted(manifests), sorted(int(path.name, 16) for path in (cache.root / MODEL_FILES).glob("0*"))


def test_as_many_models_are_kept_as_a_server_may_have(cache: FolderStore) -> None:
    for _ in range(2):
        prune_models(cache)
        assert there(cache) == (list(range(70 - MOST_MODELS, 70)), list(range(70 - MOST_MODELS, 70)))


def test_what_is_used_counts_as_new(cache: FolderStore) -> None:
    mark_used(files(cache, 0), cache.path(f"{MODELS}/{0:064x}.json"), cache.root / "none")
    prune_models(cache)
    assert there(cache) == ([0, *range(7, 70)],) * 2


def test_what_was_built_here_and_what_is_not_ours_stays(cache: FolderStore, tmp_path: Path) -> None:
    cache.vouch(b"manifest 0")
    (cache.root / MODELS / "mine.json").write_text("mine")
    os.utime(cache.root / MODELS / "mine.json", (0, 0))
    (files(cache, 1) / "folder").mkdir()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").touch()
    (cache.root / MODEL_FILES / ("a" * 64)).symlink_to(victim)
    (files(cache, 2) / "link").symlink_to(victim / "mine")
    for number in (1, 2):
        os.utime(files(cache, number), (number, number))
    prune_models(cache)
    assert 0 in there(cache)[0]
    assert (cache.root / MODELS / "mine.json").exists()
    assert (files(cache, 1) / "config.json").exists()
    assert (files(cache, 2) / "config.json").exists()
    assert (victim / "mine").exists()
    assert not files(cache, 0).exists()


def test_an_empty_cache_has_nothing_to_remove(local: FolderStore) -> None:
    prune_models(local)
    assert not (local.root / MODELS).exists()
