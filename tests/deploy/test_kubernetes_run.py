"""What the manifests run, run here: the containers of the Job and of the Deployment, against an S3 server."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.manifests import Manifest, container, environment, one, pod
from support.servers.server_process import ServerProcess, snapcap

from snapcap.service.cli.main import main
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import client

# Instead of what costs minutes to build, and of what is elsewhere than in a container.
BUCKETS = {"SNAPCAP_BUCKETS": "1,4", "SNAPCAP_THREADS": "0"}


@pytest.fixture
def cluster(
    overlays: dict[str, list[Manifest]], s3_server: str, aws_environment: None, tmp_path: Path
) -> dict[str, str]:
    """Variables for what a cluster gives: the bucket, its address, and the mounted keys."""
    store = environment(overlays["cpu"])["SNAPCAP_STORE"]
    s3 = client(S3Options(endpoint_url=s3_server, region="us-east-1"))
    s3.create_bucket(Bucket=store.removeprefix("s3://").partition("/")[0])
    assert main(["keygen", str(tmp_path / "artifacts.key")]) == 0
    return {"SNAPCAP_S3_ENDPOINT_URL": s3_server, "SNAPCAP_S3_REGION": "us-east-1", **BUCKETS}


def mounted(manifests: list[Manifest], cluster: dict[str, str], keys: Path, cache: Path) -> dict[str, str]:
    """The container's environment, with its paths where they are here."""
    variables = environment(manifests) | cluster | {"SNAPCAP_CACHE_DIR": str(cache)}
    for name, value in variables.items():
        if value.startswith("/etc/snapcap/"):
            variables[name] = str(keys / Path(value).name)
    return variables


@pytest.fixture
def server(
    overlays: dict[str, list[Manifest]], cluster: dict[str, str], built_cache: Path, tmp_path: Path
) -> Iterator[ServerProcess]:
    """The Deployment's container with an empty cache, after the Job's has published."""
    # The packages of the Job's pod are there: it publishes them.
    shutil.copytree(built_cache / "store", tmp_path / "builder" / "store")
    job = mounted(overlays["build-cpu"], cluster, tmp_path, tmp_path / "builder")
    run = snapcap(*container(overlays["build-cpu"])["args"], **job)
    assert run.returncode == 0, run.stderr
    assert "published" in run.stderr
    arguments = container(overlays["cpu"])["args"]
    assert arguments == ["serve"], "what ServerProcess runs"
    variables = mounted(overlays["cpu"], cluster, tmp_path, tmp_path / "cache")
    with ServerProcess(**variables | {"SNAPCAP_METRICS_PORT": "0"}) as process:
        yield process.wait_ready()


def test_the_job_publishes_and_the_deployment_starts_compiled_and_answers_what_it_is_asked(
    overlays: dict[str, list[Manifest]], server: ServerProcess, samples: dict[Path, str]
) -> None:
    manifests = overlays["cpu"]
    image, caption = next(iter(samples.items()))
    reply = server.caption(image)
    assert (reply["caption"], reply["backend"]) == (caption, "aot")

    probes = [
        container(manifests)[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    ]
    assert [server.call(path)[0] for path in probes] == [200, 200, 200]

    (endpoint,) = one(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert server.call(endpoint["path"])[0] == 404, "not where the clients are"
    main_port, server.port = server.port, metrics_port(server)
    status, metrics, _ = server.call(endpoint["path"])
    server.port = main_port
    assert status == 200
    triggers = one(manifests, "ScaledObject")["spec"]["triggers"]
    asked = [re.findall(r"snapcap_\w+", trigger["metadata"]["query"]) for trigger in triggers]
    names = {line.split("{")[0].split(" ")[0] for line in metrics.splitlines()}
    assert all(found and set(found) <= names for found in asked)

    started = time.monotonic()
    server.terminate()
    server.wait_for(lambda: server.call(probes[1])[0] == 503)
    assert server.call(probes[2])[0] == 200, "a pod that drains is not killed for it"
    assert server.caption(image)["caption"] == caption
    assert server.process.wait(timeout=60) == 0
    assert time.monotonic() - started < pod(manifests)["terminationGracePeriodSeconds"]


def metrics_port(server: ServerProcess) -> int:
    """The free one that it took, from its log."""
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    (port,) = [line["port"] for line in lines if line["message"] == "metrics"]
    assert isinstance(port, int)
    return port
