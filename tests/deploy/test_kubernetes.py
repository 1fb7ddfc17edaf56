"""The manifests: valid against Kubernetes's schemas, safe, consistent, and true to the program."""

import argparse
import json
import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.checkpoints.dockerfile import Dockerfile
from support.checkpoints.manifests import Manifest, build, container, environment, one, pod, workload

from snapcap.service.config.reader import read_settings
from snapcap.service.config.settings import GROUPS, Settings
from snapcap.warmup.option import options_of

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
SERVERS = ("cpu", "gpu")
BUILDS = ("build-cpu", "build-gpu")
# Not Kubernetes's own: no package brings their schemas.
CUSTOM = ("kustomize.config.k8s.io/", "keda.sh/", "monitoring.coreos.com/", "serving.k")
VERSIONS = ("1.30", "1.33", "1.37")

Overlays = dict[str, list[Manifest]]


def settings_of(manifests: list[Manifest]) -> Settings:
    """What the program reads from the container's environment; fails as the program would."""
    return read_settings(argparse.Namespace(), environment(manifests))


@pytest.mark.parametrize(
    "file", sorted(FOLDER.glob("*/*.yaml")) + sorted(FOLDER.glob("components/*/*.yaml")), ids=str
)
def test_every_file_is_yaml_without_doubled_keys(file: Path) -> None:
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{keys} in {file}"
            return super().construct_mapping(node, deep)

    (manifest,) = yaml.load_all(file.read_text(), Strict)
    if file.name == "references.yaml":
        return  # a configuration of kustomize, which has no kind
    if not manifest["apiVersion"].startswith(CUSTOM):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_overlays_fit_the_schemas(overlays: Overlays, version: str) -> None:
    assert set(overlays) == {*SERVERS, *BUILDS}
    for manifests in overlays.values():
        for manifest in manifests:
            assert manifest["metadata"]["namespace"] == "snapcap"
            if not manifest["apiVersion"].startswith(CUSTOM):
                kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("overlay", [*SERVERS, *BUILDS])
def test_pods_meet_the_restricted_security_standard(
    overlays: Overlays, dockerfile: Dockerfile, overlay: str
) -> None:
    spec, only = pod(overlays[overlay]), container(overlays[overlay])
    user, group = map(int, dockerfile.inherited("server", "USER")[-1].split(":"))
    context = spec["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, user, group)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec["automountServiceAccountToken"]
    account = one(overlays[overlay], "ServiceAccount")
    assert spec["serviceAccountName"] == account["metadata"]["name"]
    assert not account["automountServiceAccountToken"]
    assert not spec.get("hostNetwork")
    assert not spec["enableServiceLinks"], "the program refuses to start with the variables of a Service snapcap"


@pytest.mark.parametrize("overlay", [*SERVERS, *BUILDS])
def test_writable_folders_and_keys_are_mounted(overlays: Overlays, dockerfile: Dockerfile, overlay: str) -> None:
    spec, only = pod(overlays[overlay]), container(overlays[overlay])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in only["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {"/tmp", dockerfile.environment("server")["SNAPCAP_CACHE_DIR"]}
    assert all("sizeLimit" in volumes[mounts[path]["name"]]["emptyDir"] for path in writable)
    store = settings_of(overlays[overlay]).store
    (trusted,) = store.trusted_keys
    assert volumes[mounts[str(trusted.parent)]["name"]]["configMap"] == {"name": "snapcap-trusted-keys"}
    if overlay in BUILDS:
        assert store.sign_key is not None
        secret = volumes[mounts[str(store.sign_key.parent)]["name"]]["secret"]
        assert secret["secretName"] == "snapcap-sign-key"
        assert store.sign_key.name == trusted.name.removesuffix(".pub"), "a pair that `snapcap keygen` made"
    else:
        assert store.sign_key is None, "a server must not be able to sign"
        assert not any("secret" in volume for volume in volumes.values())


@pytest.mark.parametrize("machine", SERVERS)
def test_the_build_makes_what_the_servers_look_for(overlays: Overlays, machine: str) -> None:
    servers, builds = overlays[machine], overlays[f"build-{machine}"]
    assert one(servers, "ConfigMap") == one(builds, "ConfigMap")
    serving, building = settings_of(servers), settings_of(builds)
    assert (serving.model, serving.compute) == (building.model, building.compute)
    assert serving.store.address == building.store.address
    for field in ("tolerations", "nodeSelector", "affinity", "runtimeClassName"):
        assert pod(servers).get(field) == pod(builds).get(field)
    gpus = [container(m)["resources"]["limits"].get("nvidia.com/gpu") for m in (servers, builds)]
    assert gpus == (["1", "1"] if machine == "gpu" else [None, None])
    assert (serving.compute.device, container(servers)["args"], container(builds)["args"]) == (
        "cuda" if machine == "gpu" else "cpu",
        ["serve"],
        ["build"],
    )
    tags = {container(m)["image"].partition(":")[2] for m in (servers, builds)}
    assert len(tags) == 1, "of the same commit"
    assert {container(m)["image"].partition(":")[0] for m in (servers, builds)} == {"snapcap", "snapcap-builder"}


@pytest.mark.parametrize("machine", SERVERS)
def test_threads_and_workers_fit_the_cpus(overlays: Overlays, machine: str) -> None:
    """In a container the program counts the node's CPUs, so both must be set."""
    servers, builds = overlays[machine], overlays[f"build-{machine}"]
    cpus = int(container(servers)["resources"]["requests"]["cpu"])
    compute = settings_of(servers).compute
    assert 1 <= compute.threads <= max(cpus - 1, 1)
    assert 1 <= settings_of(servers).images.decode_threads <= cpus
    processes = settings_of(servers).image_processes.count
    assert processes is not None
    assert processes <= cpus // 2
    resources = container(builds)["resources"]
    workers = settings_of(builds).store.build_workers
    assert 1 <= workers <= int(resources["requests"]["cpu"])
    assert int(resources["limits"]["memory"].removesuffix("Gi")) >= 2 * workers


@pytest.mark.parametrize("machine", SERVERS)
def test_the_end_of_a_pod_adds_up(overlays: Overlays, machine: str) -> None:
    settings = settings_of(overlays[machine])
    hook = container(overlays[machine])["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = hook + settings.http.drain_delay + settings.http.grace_period
    assert pod(overlays[machine])["terminationGracePeriodSeconds"] >= needed + 5
    assert settings.http.grace_period > settings.queue.timeout, "a caption that began in time must come to its end"
    probe = container(overlays[machine])["readinessProbe"]
    unready_after = probe["periodSeconds"] * probe["failureThreshold"]
    assert settings.http.drain_delay > unready_after, "Kubernetes must have seen the 503 before connections close"


@pytest.mark.parametrize("machine", SERVERS)
def test_a_cold_start_is_not_cut_short(overlays: Overlays, machine: str) -> None:
    settings, only = settings_of(overlays[machine]), container(overlays[machine])
    startup, readiness, liveness = (only[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    slowest = settings.s3.deadline + settings.store.deadline + 3 + 90
    assert startup["periodSeconds"] * startup["failureThreshold"] > slowest
    assert startup["periodSeconds"] == 1, "a start of two seconds must not count as ten"
    assert startup["httpGet"] == readiness["httpGet"]
    assert liveness["httpGet"]["path"] != readiness["httpGet"]["path"], "liveness must not depend on warm-up or S3"


@pytest.mark.parametrize("overlay", [*SERVERS, *BUILDS])
def test_selectors_select(overlays: Overlays, overlay: str) -> None:
    manifests = overlays[overlay]
    labels = workload(manifests)["spec"]["template"]["metadata"]["labels"]
    policy = one(manifests, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    names = [peer.get("podSelector") for rule in policy["egress"] for peer in rule["to"]]
    assert {"matchLabels": {"k8s-app": "kube-dns"}} in names, "kustomize adds to selectors it should leave alone"
    if overlay in BUILDS:
        assert "ingress" not in policy
        return
    assert one(manifests, "Service")["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert one(manifests, kind)["spec"]["selector"]["matchLabels"] == labels
    for spread in pod(manifests)["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"] == labels
    monitor = one(manifests, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= one(manifests, "Service")["metadata"]["labels"].items()
    assert (
        one(manifests, "ScaledObject")["spec"]["scaleTargetRef"]["name"] == workload(manifests)["metadata"]["name"]
    )
    assert "replicas" not in workload(manifests)["spec"], "the autoscaler counts them"


@pytest.mark.parametrize("machine", SERVERS)
def test_ports_are_named_alike_from_the_scrape_to_the_listener(overlays: Overlays, machine: str) -> None:
    manifests = overlays[machine]
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    http = settings_of(manifests).http
    assert ports == {"http": http.port, "metrics": http.metrics_port}
    service = {port["name"]: port["targetPort"] for port in one(manifests, "Service")["spec"]["ports"]}
    assert set(service.values()) == set(ports)
    assert [end["port"] for end in one(manifests, "ServiceMonitor")["spec"]["endpoints"]] == ["metrics"]
    clients, prometheus = one(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert (clients["ports"], prometheus["ports"]) == ([{"port": "http"}], [{"port": "metrics"}])
    for name in ("startup", "readiness", "liveness"):
        assert container(manifests)[f"{name}Probe"]["httpGet"]["port"] == "http"


def with_component(folder: Path, name: str, tmp_path: Path, machine: str = "cpu") -> list[Manifest]:
    """Builds an overlay of a tree of manifests with one more component, whose line is turned on."""
    copy = tmp_path / "with" / "kubernetes"
    shutil.copytree(folder, copy)
    file = copy / "overlays" / machine / "kustomization.yaml"
    line = f"  - ../../components/{name}\n"
    assert line.replace("- ", "# - ") in file.read_text()
    file.write_text(file.read_text().replace(line.replace("- ", "# - "), line))
    return build(file.parent)


def test_api_keys_can_be_added(tmp_path: Path, overlays: Overlays) -> None:
    manifests = with_component(FOLDER, "api-keys", tmp_path)
    kubernetes_validate.validate(workload(manifests), VERSIONS[0], strict=True)
    file = settings_of(manifests).http.api_key_file
    assert file is not None
    (mount,) = [m for m in container(manifests)["volumeMounts"] if m["mountPath"] == str(file.parent)]
    (volume,) = [volume for volume in pod(manifests)["volumes"] if volume["name"] == mount["name"]]
    assert volume["secret"]["secretName"] in (FOLDER / "components" / "api-keys" / "kustomization.yaml").read_text()
    assert settings_of(overlays["cpu"]).http.api_key_file is None


def test_an_ingress_can_be_added_and_the_servers_know_its_name(tmp_path: Path, overlays: Overlays) -> None:
    """A name that a user puts into the Ingress is not answered with 421: it reaches the servers from there."""
    copy, name = tmp_path / "kubernetes", "pictures.example.org"
    shutil.copytree(FOLDER, copy)
    file = copy / "components" / "ingress" / "ingress.yaml"
    file.write_text(file.read_text().replace("- host: captions.example.com", f"- host: {name}"))
    manifests = with_component(copy, "ingress", tmp_path)
    ingress, settings = one(manifests, "Ingress"), settings_of(manifests)
    for manifest in (ingress, workload(manifests)):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)
    assert settings.http.hosts == (name,)
    assert [host for entry in ingress["spec"]["tls"] for host in entry["hosts"]] == [name]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = one(manifests, "Service")
    assert (rule["host"], path["backend"]["service"]) == (
        name,
        {"name": service["metadata"]["name"], "port": {"name": service["spec"]["ports"][0]["name"]}},
    )
    size = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert int(size.removesuffix("m")) << 20 == settings.limits.max_body_bytes
    for way in ("read", "send"):
        seconds = ingress["metadata"]["annotations"][f"nginx.ingress.kubernetes.io/proxy-{way}-timeout"]
        assert int(seconds) > settings.queue.timeout, "the server's own 504 must arrive"
    assert settings_of(overlays["cpu"]).http.hosts == ()


@pytest.mark.parametrize("machine", SERVERS)
def test_the_autoscaler_counts_in_batches(overlays: Overlays, machine: str) -> None:
    scaled = one(overlays[machine], "ScaledObject")["spec"]
    rows = settings_of(overlays[machine]).compute.buckets[-1]
    assert [int(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"]] == [rows // 4, rows * 3 // 4]
    name = one(overlays[machine], "Service")["metadata"]["name"]
    for trigger in scaled["triggers"]:
        assert f'job="{name}"' in trigger["metadata"]["query"], "the operator names the job after the Service"
    assert scaled["minReplicaCount"] > one(overlays[machine], "PodDisruptionBudget")["spec"]["maxUnavailable"]


@pytest.mark.parametrize(("machine", "name"), [("cpu", "hpa-cpu"), ("cpu", "hpa-queue"), ("gpu", "hpa-queue")])
def test_kubernetes_own_autoscaler_can_be_added(
    overlays: Overlays, tmp_path: Path, machine: str, name: str
) -> None:
    manifests = with_component(FOLDER, name, tmp_path, machine)
    scaler = one(manifests, "HorizontalPodAutoscaler")
    for manifest in (scaler, workload(manifests)):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", workload(manifests)["metadata"]["name"])
    assert "replicas" not in workload(manifests)["spec"], "the autoscaler counts them"
    theirs = one(overlays[machine], "ScaledObject")["spec"]
    assert scaler["spec"]["behavior"] == theirs["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    if name == "hpa-cpu":
        assert container(manifests)["resources"]["requests"]["cpu"], "a share of nothing"
        return
    wanted = {
        re.search(r"snapcap_\w+", trigger["metadata"]["query"])[0]: trigger["metadata"]["threshold"]  # type: ignore[index]
        for trigger in theirs["triggers"]
    }
    found = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for metric in scaler["spec"]["metrics"]
    }
    assert found == wanted


def test_the_policies_are_for_the_store_and_the_roles_for_the_accounts(overlays: Overlays) -> None:
    (address,) = {settings_of(manifests).store.address for manifests in overlays.values()}
    for name, overlay in (("server", "cpu"), ("builder", "build-cpu")):
        policy = json.loads((FOLDER / "iam" / f"{name}.json").read_text())
        resources = {resource for statement in policy["Statement"] for resource in statement["Resource"]}
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        arn = f"arn:aws:s3:::{bucket}"
        allowed = (arn, f"{arn}/{prefix}/", f"{arn}/checkpoints/")
        assert all(resource == allowed[0] or resource.startswith(allowed[1:]) for resource in resources)
        role = one(overlays[overlay], "ServiceAccount")["metadata"]["annotations"]["eks.amazonaws.com/role-arn"]
        assert role.endswith(f"role/snapcap-{name}")


def test_what_the_readme_creates_is_what_the_manifests_use(overlays: Overlays) -> None:
    text = (FOLDER / "README.md").read_text()
    jobs = {one(overlays[name], "Job")["metadata"]["name"] for name in BUILDS}
    assert jobs == set(re.findall(r"job/(\S+)", text)) == set(re.findall(r"delete job (\S+)", text))
    folders = set(re.findall(r"-k deploy/kubernetes/(\S+)", text))
    assert folders == {"namespace", "overlays/build-cpu", "overlays/cpu", "trial", "knative", "kserve"}
    rows = set(re.findall(r"^\| `(\S+)`(?:, `(\S+)`)? \|", text, re.MULTILINE))
    named = {name for row in rows for name in row if name and "." not in name}
    assert all(list(FOLDER.glob(name)) for name in named)
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"iam"} == {
        name.partition("/")[0] for name in named
    }
    known = {option.variable for group in GROUPS.values() for option in options_of(group).values()}
    assert set(re.findall(r"SNAPCAP_\w+", text)) <= known
