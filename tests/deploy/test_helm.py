"""The Helm chart makes the manifests that kustomize makes of the overlays, which other tests look into."""

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from support.checkpoints.manifests import Manifest, container, environment, helm, one, pod, render

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
CUSTOM = ("keda.sh/", "monitoring.coreos.com/")
ROLE = "arn:aws:iam::111122223333:role/snapcap-"
# The placeholders of the manifests, which a release does not have.
ROLES = ("--set", f"roles.server={ROLE}server,roles.builder={ROLE}builder")
KEY = ("--set", "trustedKey=key")


def comparable(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    """By kind and name, without what Helm and kustomize do in ways of their own: the namespace, the names of the
    settings and of the Job, and the annotation by which other settings make a rollout."""
    found = {}
    for each in copy.deepcopy(manifests):  # which other tests read too
        metadata = {name: value for name, value in each["metadata"].items() if name != "namespace"}
        if each["kind"] in ("ConfigMap", "Job"):
            metadata["name"] = "-".join(metadata["name"].split("-")[:2])
        whole: dict[str, Any] = {**each, "metadata": metadata}
        if each["kind"] in ("Deployment", "Job"):
            template = whole["spec"]["template"]
            template["metadata"].pop("annotations", None)
            (only,) = template["spec"]["containers"]
            only["envFrom"] = [{"configMapRef": {"name": "snapcap-settings"}}]
        found[each["kind"], metadata["name"]] = whole
    return found


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_a_release_is_the_overlays_of_a_machine(overlays: dict[str, list[Manifest]], machine: str) -> None:
    values = f"machine=machine-{machine},components={{prometheus-operator,keda}}"
    release = comparable(render(CHART, *KEY, *ROLES, "--set", values))
    keys = release.pop(("ConfigMap", "snapcap-trusted"))
    assert keys["data"] == {"artifacts.key.pub": "key"}
    assert release == comparable(overlays[machine]) | comparable(overlays[f"build-{machine}"])


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize(
    "components", ["", "api-keys", "ingress", "prometheus-operator", "hpa-cpu", "hpa-queue", "keda"]
)
def test_each_component_fits_the_schemas(components: str, version: str) -> None:
    for manifest in render(CHART, *KEY, "--set", f"components={{{components}}}" if components else "build=true"):
        if not manifest["apiVersion"].startswith(CUSTOM):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_values_are_what_they_say() -> None:
    values = (
        "machine=machine-gpu,components={ingress,api-keys,hpa-queue},build=false,cacheSize=32Gi,minReplicas=3,"
        "image.repository=registry.example/snapcap,image.tag=9,ingress.host=a.example,ingress.className=other,"
        "settings.SNAPCAP_MODEL=s3://bucket/llava,nodeSelector.gpu=h100,roles.server=role,signKeySecret=mine"
    )
    manifests = render(CHART, *KEY, "--set", values, "--set-string", r"settings.SNAPCAP_BUCKETS=1\,32")
    assert not any(each["kind"] == "Job" for each in manifests)
    assert container(manifests)["image"] == "registry.example/snapcap:9"
    assert pod(manifests)["nodeSelector"] == {"gpu": "h100"}
    caches = [volume for volume in pod(manifests)["volumes"] if volume["name"] == "cache"]
    assert caches == [{"name": "cache", "emptyDir": {"sizeLimit": "32Gi"}}]
    settings = [each for each in manifests if each["metadata"]["name"] != "snapcap-trusted-keys"]
    variables = environment(settings)
    assert variables["SNAPCAP_MODEL"] == "s3://bucket/llava"
    assert (variables["SNAPCAP_ALLOWED_HOST"], variables["SNAPCAP_DEVICE"]) == ("a.example", "cuda")
    ingress = one(manifests, "Ingress")["spec"]
    assert (ingress["ingressClassName"], ingress["tls"][0]["hosts"]) == ("other", ["a.example"])
    assert ingress["rules"][0]["host"] == "a.example"
    scaler = one(manifests, "HorizontalPodAutoscaler")["spec"]
    assert [metric["pods"]["target"]["averageValue"] for metric in scaler["metrics"]] == ["8", "24"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 10)
    assert "replicas" not in one(manifests, "Deployment")["spec"]
    assert one(manifests, "ServiceAccount")["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "role"}


def test_numbers_of_a_values_file_are_written_in_full(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "settings: {SNAPCAP_MAX_PIXELS: 100000000, SNAPCAP_MAX_BODY_BYTES: 20971520, SNAPCAP_BODY_TIMEOUT: 0.5}\n"
        "image: {tag: 20261128}\n"
    )
    manifests = render(CHART, *KEY, "--set", "build=false", "--values", str(values))
    settings = environment([each for each in manifests if each["metadata"]["name"] != "snapcap-trusted-keys"])
    names = ("SNAPCAP_MAX_PIXELS", "SNAPCAP_MAX_BODY_BYTES", "SNAPCAP_BODY_TIMEOUT")
    assert [settings[name] for name in names] == ["100000000", "20971520", "0.5"]
    assert container(manifests)["image"] == "snapcap:20261128"


def test_other_settings_make_a_rollout_and_another_job() -> None:
    def names(*options: str) -> tuple[str, str]:
        manifests = render(CHART, *KEY, *options)
        deployment = one(manifests, "Deployment")["spec"]["template"]["metadata"]
        return one(manifests, "Job")["metadata"]["name"], deployment["annotations"]["snapcap/settings"]

    same, other = names(), names("--set", "settings.SNAPCAP_MODEL=other/model")
    assert names() == same
    assert (same[0] != other[0], same[1] != other[1]) == (True, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [((), "--set-file trustedKey=artifacts.key.pub"), ((*KEY, "--set", "components={keta}"), "no component keta")],
)
def test_what_is_missing_is_named(options: tuple[str, ...], says: str) -> None:
    run = helm("template", "snapcap", str(CHART), *options)
    assert run.returncode != 0
    assert says in run.stderr


def test_a_package_of_the_chart_holds_no_key(tmp_path: Path) -> None:
    """The chart links to folders of manifests, and not to that in which the private key may lie."""
    linked = {link.name: link.resolve() for link in (CHART / "kubernetes").iterdir()}
    kubernetes = ROOT / "deploy" / "kubernetes"
    assert linked == {name: kubernetes / name for name in ("base", "build", "components")}
    run = helm("package", str(CHART), "--destination", str(tmp_path))
    assert run.returncode == 0, run.stderr
    (package,) = tmp_path.iterdir()
    manifests = render(package, *KEY)
    assert one(manifests, "Deployment")["metadata"]["name"] == "snapcap"
