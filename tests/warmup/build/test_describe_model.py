"""What is published is of one revision."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.publish import ModelFiles
from snapcap.warmup.artifacts.store import WEIGHTS, StoreError
from snapcap.warmup.build import release
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.weights.find import prepared_name

SOURCE, DIGEST = "owner/name", "d" * 64


@pytest.fixture
def revisions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commits that a source's folder is of, each time that it is asked."""
    commits = ["1", "1"]
    coming: Iterator[str] = iter(commits)
    monkeypatch.setattr(release, "downloaded_identity", lambda *_: {"commit": next(coming)})
    monkeypatch.setattr(release, "recorded_digest", lambda *_: DIGEST)
    monkeypatch.setattr("snapcap.warmup.weights.find.layout_digest", lambda *_: "layout")
    return commits


def described(tmp_path: Path) -> ModelFiles:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    local = FolderStore.open(tmp_path / "store")
    checkpoint: Any = SimpleNamespace(folder=folder, config=None, transform=None)
    plan: Any = SimpleNamespace(device_type="cpu", dtype="float32")
    weights = local.path(f"{WEIGHTS}/{prepared_name(DIGEST, checkpoint, plan)}")
    weights.parent.mkdir(exist_ok=True)
    weights.write_bytes(b"prepared")
    options = StartOptions(ModelOptions(SOURCE), ComputeOptions("cpu", "float32"))
    return release.describe_model(options, checkpoint, plan, local)


def test_a_manifest_is_of_the_revision_that_was_read(tmp_path: Path, revisions: list[str]) -> None:
    manifest = described(tmp_path).manifest
    assert manifest.model_weights.identity == {"commit": "1"}
    assert list(manifest.entries) == ["config.json"]


def test_a_checkpoint_that_changes_while_it_is_read_is_not_published(tmp_path: Path, revisions: list[str]) -> None:
    revisions[1] = "2"
    with pytest.raises(StoreError, match="was changed while it was read; run snapcap build --weights again"):
        described(tmp_path)
