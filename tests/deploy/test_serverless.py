"""Knative and KServe: what both take of a pod, what the program reads of it, and what clients are answered."""

import argparse
import base64
import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
from support.checkpoints.dockerfile import Dockerfile
from support.checkpoints.manifests import Manifest, build, one
from support.servers.server_process import ServerProcess, reserved_port

from snapcap.service.config.reader import read_settings
from snapcap.service.config.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
# What Knative Serving takes of a pod where no feature flag is set (emptyDir is on by default), and of a container.
KNATIVE_POD = {
    "serviceAccountName",
    "containers",
    "volumes",
    "imagePullSecrets",
    "enableServiceLinks",
    "automountServiceAccountToken",
    "timeoutSeconds",
    "containerConcurrency",
}
KNATIVE_CONTAINER = {
    *(
        "name",
        "args",
        "command",
        "env",
        "envFrom",
        "workingDir",
        "image",
        "imagePullPolicy",
        "livenessProbe",
        "ports",
    ),
    *("readinessProbe", "resources", "securityContext", "volumeMounts"),
}
# The members of a ServingRuntime that are not the pod's, and those that are.
KSERVE_RUNTIME = {"supportedModelFormats", "protocolVersions", "multiModel", "annotations"}
KSERVE_POD = {"containers", "volumes", "nodeSelector", "affinity", "tolerations", "labels", "imagePullSecrets"}
# Taken in a pod of Knative by its queue-proxy.
KNATIVE_PORTS = {8008, 8012, 8013, 8022, 9090, 9091}


@pytest.fixture(scope="module")
def knative() -> list[Manifest]:
    return build(DEPLOY / "kubernetes" / "knative")


@pytest.fixture(scope="module")
def kserve() -> list[Manifest]:
    return build(DEPLOY / "kubernetes" / "kserve")


def validate_pod(spec: Manifest) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.30", strict=True)


def container_of(
    manifests: list[Manifest], spec: Manifest, dockerfile: Dockerfile
) -> tuple[Manifest, dict[str, str]]:
    """The container, once it is held to what all pods here are, and its environment."""
    (only,) = spec["containers"]
    user, group = map(int, dockerfile.inherited("server", "USER")[-1].split(":"))
    assert only["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }, "restricted, without a security context of the pod"
    assert only["resources"]["requests"] == only["resources"]["limits"]
    assert {mount["name"] for mount in only["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    settings = one(manifests, "ConfigMap")
    assert only["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}], "kustomize renames it"
    return only, settings["data"] | {entry["name"]: entry["value"] for entry in only["env"]}


def read(variables: dict[str, str]) -> Settings:
    return read_settings(argparse.Namespace(), variables)


def test_knative_takes_the_service_and_the_program_its_settings(
    knative: list[Manifest], plain_overlays: dict[str, list[Manifest]], dockerfile: Dockerfile
) -> None:
    service = one(knative, "Service")
    assert service["apiVersion"] == "serving.knative.dev/v1"
    template = service["spec"]["template"]
    assert set(template["spec"]) <= KNATIVE_POD
    spec = {
        name: value
        for name, value in template["spec"].items()
        if name not in ("timeoutSeconds", "containerConcurrency")
    }
    readiness = spec["containers"][0]["readinessProbe"]
    assert readiness == {"httpGet": {"path": "/readyz"}}, "with a period Knative asks each second at most"
    for probe in ("readinessProbe", "livenessProbe"):  # Knative puts the container's port there
        spec["containers"][0][probe]["httpGet"]["port"] = 8000
    validate_pod(spec)
    only, variables = container_of(knative, spec, dockerfile)
    assert set(only) <= KNATIVE_CONTAINER
    settings = read(variables)
    assert [port["containerPort"] for port in only["ports"]] == [settings.http.port], "one port, says Knative"
    assert settings.http.metrics_port not in KNATIVE_PORTS
    assert settings.queue.timeout < settings.http.grace_period < template["spec"]["timeoutSeconds"]
    rows = settings.compute.buckets[-1]
    notes = template["metadata"]["annotations"]
    assert int(notes["autoscaling.knative.dev/target"]) == rows * 3 // 4
    assert template["spec"]["containerConcurrency"] == 2 * rows
    assert notes["autoscaling.knative.dev/min-scale"] == "0"
    assert one(knative, "ConfigMap") == one(plain_overlays["build-cpu"], "ConfigMap"), "what the Job builds for"
    assert one(knative, "ServiceAccount")["metadata"]["name"] == spec["serviceAccountName"]


def test_kserve_takes_the_runtime_and_the_inference_service(
    kserve: list[Manifest], plain_overlays: dict[str, list[Manifest]], dockerfile: Dockerfile
) -> None:
    runtime, service = one(kserve, "ServingRuntime"), one(kserve, "InferenceService")
    assert (runtime["apiVersion"], service["apiVersion"]) == (
        "serving.kserve.io/v1alpha1",
        "serving.kserve.io/v1beta1",
    )
    assert set(runtime["spec"]) <= KSERVE_RUNTIME | KSERVE_POD
    spec = {name: value for name, value in runtime["spec"].items() if name in KSERVE_POD}
    validate_pod(spec)
    only, variables = container_of(kserve, spec, dockerfile)
    assert only["name"] == "kserve-container"
    settings = read(variables)
    assert [port["containerPort"] for port in only["ports"]] == [settings.http.port]
    assert settings.http.metrics_port not in KNATIVE_PORTS
    assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == str(settings.http.metrics_port)
    assert settings.http.drain_delay + settings.http.grace_period < 30, "what a pod has where nothing else is said"
    assert settings.http.grace_period > settings.queue.timeout
    readiness = only["readinessProbe"]
    assert settings.http.drain_delay > readiness["periodSeconds"] * readiness["failureThreshold"]
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    (served,) = runtime["spec"]["supportedModelFormats"]
    assert model["modelFormat"]["name"] == served["name"]
    assert [model["protocolVersion"]] == runtime["spec"]["protocolVersions"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert predictor["scaleTarget"] == settings.compute.buckets[-1] * 3 // 4
    further = ("minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "model")
    own = {name: value for name, value in predictor.items() if name not in further}
    validate_pod({**own, "containers": [{"name": "kserve-container"}]})
    assert predictor["serviceAccountName"] == one(kserve, "ServiceAccount")["metadata"]["name"]
    assert one(kserve, "ConfigMap") == one(plain_overlays["build-cpu"], "ConfigMap"), "what the Job builds for"


def test_a_client_of_the_protocol_is_answered_by_the_runtimes_command(
    kserve: list[Manifest], dockerfile: Dockerfile, samples: dict[Path, str], tmp_path: Path
) -> None:
    runtime, service = one(kserve, "ServingRuntime"), one(kserve, "InferenceService")
    only, variables = container_of(kserve, runtime["spec"], dockerfile)
    command, *arguments = [text.replace("{{.Name}}", service["metadata"]["name"]) for text in only["args"]]
    assert command == "serve", "what ServerProcess runs"
    reserved = reserved_port()
    metrics = reserved.getsockname()[1]
    # What a cluster has and this machine has not, and one bucket: no artifacts are needed for what is asked here.
    elsewhere = {
        "SNAPCAP_STORE": "",
        "SNAPCAP_TRUSTED_KEY": "",
        "SNAPCAP_CACHE_DIR": str(tmp_path),
        "SNAPCAP_BUILD": "off",
    }
    here = {"SNAPCAP_BUCKETS": "1", "SNAPCAP_THREADS": "0", "SNAPCAP_METRICS_PORT": str(metrics)}
    environment = {name: value for name, value in (variables | elsewhere | here).items() if value}
    image, caption = next(iter(samples.items()))
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
    tensor["data"] = [base64.b64encode(image.read_bytes()).decode()]
    path = re.findall(r"\$GATEWAY(\S+)\"", (DEPLOY / "kubernetes" / "README.md").read_text())[0]
    with reserved, ServerProcess(*arguments, **environment) as server:
        server.wait_ready()
        for probe in ("readinessProbe", "livenessProbe"):
            assert server.call(only[probe]["httpGet"]["path"])[0] == 200
        status, body, _ = server.call(
            path, json.dumps({"inputs": [tensor]}).encode(), {"Content-Type": "application/json"}
        )
        assert (status, body["outputs"][0]["data"]) == (200, [caption]), body
        assert body["model_name"] == service["metadata"]["name"]
        server.port = metrics
        assert server.call(runtime["spec"]["annotations"]["prometheus.kserve.io/path"])[0] == 200
