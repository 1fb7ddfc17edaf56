"""Publishes weights made up by the test to a folder store, as if they were a model's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.published import make_model

from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import CHUNK_BYTES, Manifest, seal
from snapcap.warmup.artifacts.publish import ModelFiles, publish_model
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.artifacts.store import ArtifactStore, model_name


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Two chunks and a bit, and two small files. Nobody writes to them."""
    return make_model(tmp_path_factory.mktemp("model"), 2 * CHUNK_BYTES + 12_345)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The same in one small chunk."""
    return make_model(tmp_path_factory.mktemp("small"), 70_000)


@pytest.fixture
def shop(tmp_path: Path) -> FolderStore:
    """A store that is not the local one."""
    return FolderStore.open(tmp_path / "shop")


@pytest.fixture
def put(signer: Signer, trust: Trust) -> Callable[..., Manifest]:
    """``put(store, model, **changes)`` publishes a model, with weights that are described so; ``by``: who signs."""

    def publish(store: ArtifactStore, model: ModelFiles, by: Signer | None = signer, **changes: Any) -> Manifest:
        published = publish_model(store, model, by, trust)
        assert published.result == "published", published.reason
        manifest = replace(model.manifest, weights=replace(model.manifest.model_weights, **changes))
        if changes:
            store.write(model_name(model.manifest.key), seal(manifest, by))
        return manifest

    return publish
