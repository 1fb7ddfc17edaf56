"""A plain cluster: what is applied to it, in which order, needs nothing that Kubernetes itself does not have."""

import argparse
import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
from support.checkpoints.manifests import Manifest, build, container, environment, one, pod, workload

from snapcap.service.cli.main import main
from snapcap.service.config.reader import read_settings
from snapcap.warmup.artifacts.signing import load_signer

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
# What an API server of the oldest version has and keeps, with nothing installed on it.
BUILT_IN = {
    ("v1", "ConfigMap"),
    ("v1", "Namespace"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "Secret"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("apps/v1", "Deployment"),
    ("batch/v1", "Job"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
}
VERSIONS = ("1.30", "1.37")


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """What kustomize makes of the namespace's folder once `snapcap keygen` has put the keys there."""
    copy = tmp_path_factory.mktemp("namespace") / "namespace"
    shutil.copytree(FOLDER / "namespace", copy, ignore=shutil.ignore_patterns("*.key*"))
    assert main(["keygen", str(copy / "artifacts.key")]) == 0
    load_signer(copy / "artifacts.key")
    return build(copy)


def accept(manifest: Manifest, version: str) -> None:
    """As an API server with strict field validation, and its rules for names."""
    assert (manifest["apiVersion"], manifest["kind"]) in BUILT_IN, f"{manifest['kind']} needs a CRD"
    kubernetes_validate.validate(manifest, version, strict=True)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", manifest["metadata"]["name"])
    for label, value in manifest["metadata"].get("labels", {}).items():
        assert re.fullmatch(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9._-]{1,63}", label)
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,63}", value)


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_that_is_applied_needs_a_crd(
    plain_overlays: dict[str, list[Manifest]], namespace: list[Manifest], version: str
) -> None:
    for manifests in (namespace, build(FOLDER / "base"), build(FOLDER / "build"), *plain_overlays.values()):
        assert manifests
        for manifest in manifests:
            accept(manifest, version)


def test_a_trial_needs_no_store_and_no_keys() -> None:
    """A server with a compiler and a volume of its own, and nothing that must be applied before it."""
    manifests = build(FOLDER / "trial")
    for manifest in manifests:
        accept(manifest, VERSIONS[0])
    settings = read_settings(argparse.Namespace(), environment(manifests))
    assert (settings.store.address, settings.store.trusted_keys) == ("", ())
    assert container(manifests)["image"].startswith("snapcap-builder:")
    assert (workload(manifests)["spec"]["replicas"], workload(manifests)["spec"]["strategy"]) == (
        1,
        {"type": "Recreate"},
    )
    assert one(manifests, "PersistentVolumeClaim")["metadata"]["name"] == "snapcap-cache"
    volumes = {volume["name"]: volume for volume in pod(manifests)["volumes"]}
    assert volumes["cache"] == {"name": "cache", "persistentVolumeClaim": {"claimName": "snapcap-cache"}}
    assert not any({"secret", "configMap"} & set(volume) for volume in volumes.values())
    assert {mount["name"] for mount in container(manifests)["volumeMounts"]} == set(volumes)


def test_the_check_finds_a_crd_and_a_field_that_no_api_server_has(overlays: dict[str, list[Manifest]]) -> None:
    with pytest.raises(AssertionError, match="ScaledObject needs a CRD"):
        accept(one(overlays["cpu"], "ScaledObject"), VERSIONS[0])
    service = one(overlays["cpu"], "Service")
    with pytest.raises(kubernetes_validate.ValidationError, match="sessionAfinity"):
        accept({**service, "spec": {**service["spec"], "sessionAfinity": "None"}}, VERSIONS[0])


def test_whatever_a_pod_refers_to_has_been_applied_before_it(
    plain_overlays: dict[str, list[Manifest]], namespace: list[Manifest]
) -> None:
    """By the lines of the README, in their order."""
    text = (FOLDER / "README.md").read_text()
    lines = re.findall(r"^(?:snapcap|kubectl) .*$", text[: text.index("```\n\nThe third line")], re.MULTILINE)
    assert [line.split()[-1].rpartition("/")[2] for line in lines] == [
        "artifacts.key",
        "namespace",
        "build-cpu",
        "snapcap-build",
        "cpu",
    ]
    assert "wait --for=condition=complete" in lines[3], "the servers come when there are artifacts for them"
    there = {(each["kind"], each["metadata"]["name"]) for each in namespace}
    assert ("Namespace", "snapcap") in there
    for name in ("build-cpu", "cpu"):
        manifests = plain_overlays[name]
        assert {each["metadata"]["namespace"] for each in manifests} == {"snapcap"}
        there |= {(each["kind"], each["metadata"]["name"]) for each in manifests}
        assert _wanted(manifests) <= there


def _wanted(manifests: list[Manifest]) -> set[tuple[str, str]]:
    spec = pod(manifests)
    wanted = {("ServiceAccount", spec["serviceAccountName"])}
    wanted |= {("ConfigMap", source["configMapRef"]["name"]) for source in container(manifests)["envFrom"]}
    for volume in spec["volumes"]:
        if "configMap" in volume:
            wanted.add(("ConfigMap", volume["configMap"]["name"]))
        if "secret" in volume:
            wanted.add(("Secret", volume["secret"]["secretName"]))
    return wanted


def test_the_keys_have_the_names_of_the_files_that_are_mounted(namespace: list[Manifest]) -> None:
    secret, keys = one(namespace, "Secret"), one(namespace, "ConfigMap")
    assert set(secret["data"]) == {"artifacts.key"}
    assert set(keys["data"]) == {"artifacts.key.pub"}, "no private key is in a ConfigMap"
    labels = one(namespace, "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    ignored = (FOLDER.parents[1] / ".gitignore").read_text().splitlines()
    assert "/deploy/kubernetes/namespace/artifacts.key*" in ignored
