"""Provides the Dockerfile's instructions, and what kustomize makes of the overlays."""

import re
import shutil
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
def plain_overlays() -> dict[str, list[Manifest]]:
    """The manifests of every overlay by its name, as they are in the repository."""
    return {folder.name: manifests.build(folder) for folder in sorted(OVERLAYS.iterdir())}


@pytest.fixture(scope="session")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """The same with KEDA and the Prometheus operator, whose lines are turned on as the comment above them says."""
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(OVERLAYS.parent, copy)
    for file in copy.glob("overlays/*/kustomization.yaml"):
        lines = re.sub(r"^  # (- .*/(?:keda|prometheus-operator))$", r"  \1", file.read_text(), flags=re.MULTILINE)
        file.write_text(lines)
    return {folder.name: manifests.build(folder) for folder in sorted((copy / "overlays").iterdir())}
