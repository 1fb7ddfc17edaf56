"""Provides the Dockerfile's instructions, and what kustomize makes of the overlays."""

from pathlib import Path

import pytest
from support.checkpoints import manifests
from support.checkpoints.dockerfile import Dockerfile
from support.checkpoints.manifests import Manifest

ROOT = Path(__file__).parents[2]
OVERLAYS = ROOT / "deploy" / "kubernetes" / "overlays"


@pytest.fixture(scope="session")
def dockerfile() -> Dockerfile:
    return Dockerfile.read(ROOT / "Dockerfile")


@pytest.fixture(scope="session")
def overlays() -> dict[str, list[Manifest]]:
    """The manifests of every overlay by its name."""
    return {folder.name: manifests.build(folder) for folder in sorted(OVERLAYS.iterdir())}
