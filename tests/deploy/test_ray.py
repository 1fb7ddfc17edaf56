"""The Ray Serve application on a local Ray: two replicas, started by `serve run` from deploy/ray/cpu.yaml."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.checkpoints.build_folders import nearly_built
from support.servers.server_process import ServerProcess, clean_environment, snapcap

from snapcap.service.readiness import Readiness

pytest.importorskip(
    "ray.serve", reason="RAY IS NOT INSTALLED: pip install -c constraints.txt 'snapcap[ray]' TO TEST IT"
)
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
STARTED = "process_start_time_seconds"
BUCKETS = "1,4"


class RayServer(ServerProcess):
    """`serve run` on a free port, with a Ray of its own; a context manager that ends both."""

    def __init__(self, configuration: dict[str, Any], folder: Path) -> None:
        super().__init__()
        self._folder = folder
        # Short: the sockets of Ray are in it, and the path of a socket has 107 characters at most.
        self._sessions = tempfile.mkdtemp(prefix="ray")
        configuration["http_options"] = {"host": "127.0.0.1", "port": self.port}
        self._file = folder / "serve.yaml"
        self._file.write_text(yaml.safe_dump(configuration))

    def __enter__(self) -> "RayServer":
        environment = clean_environment(
            RAY_TMPDIR=self._sessions,
            RAY_AUTH_MODE="disabled",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ADDRESS="local",
            PYTHONPATH=str(ROOT),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", "--app-dir", str(ROOT), str(self._file)],
            env=environment,
            cwd=self._folder,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self._sessions, ignore_errors=True)

    def replicas(self, count: int) -> dict[float, dict[str, float]]:
        """The metrics of each replica, by when it started: asked until so many have answered."""
        found: dict[float, dict[str, float]] = {}
        for _ in range(200):
            metrics = self.metrics()
            found[metrics[STARTED]] = metrics
            if len(found) == count:
                return found
        raise AssertionError(f"{len(found)} replicas answer, not {count}")


@pytest.fixture(scope="module")
def configuration() -> dict[str, Any]:
    """That of the repository, for this machine."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / "cpu.yaml").read_text())
    (application,) = found["applications"]
    application["args"] = {"buckets": BUCKETS}
    (deployment,) = application["deployments"]
    assert deployment["autoscaling_config"]["min_replicas"] == 2
    deployment["ray_actor_options"] = {"num_cpus": 0.5}
    return found


@pytest.fixture(scope="module")
def server(
    configuration: dict[str, Any], built_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayServer]:
    """Two replicas with one store, where all is compiled but one package."""
    folder = tmp_path_factory.mktemp("ray")
    nearly_built(built_cache, folder / "cache" / "store")
    configuration["applications"][0]["args"]["cache_dir"] = str(folder / "cache")
    with RayServer(configuration, folder) as running:
        yield running.wait_ready()


def test_two_replicas_serve_at_once_build_once_and_end_up_compiled(
    server: RayServer, samples: dict[Path, str]
) -> None:
    published = 'snapcap_artifact_publish_total{result="published"}'
    swapped = 'snapcap_bucket_swaps_total{result="swapped"}'
    wanted = 2 * len(BUCKETS.split(","))

    def compiled() -> bool:
        for path, caption in samples.items():
            assert server.caption(path)["caption"] == caption
        return all(replica.get(swapped) == wanted for replica in server.replicas(2).values())

    server.wait_for(compiled, seconds=400)
    replicas = [*server.replicas(2).values()]
    assert sorted(replica.get(published, 0.0) for replica in replicas) == [0.0, 1.0], "one has built, for both"
    mismatch = 'snapcap_bucket_swaps_total{result="mismatch"}'
    assert [replica.get(mismatch, 0.0) for replica in replicas] == [0.0, 0.0]
    assert server.caption(next(iter(samples)))["backend"] == "aot"


def test_threads_are_those_of_rays_share_and_not_of_the_machine(server: RayServer, tmp_path: Path) -> None:
    """Threads are a factor of the artifact key: half a CPU has one."""
    run = snapcap("explain", "--buckets", BUCKETS, "--threads", "1", "--cache-dir", str(tmp_path))
    key = re.search(r"^key +([0-9a-f]{64})$", run.stdout, re.MULTILINE)
    assert key is not None
    assert server.startup()["artifacts"]["key"] == key[1]


def test_the_routes_are_those_of_snapcap_serve(server: RayServer, tmp_path: Path) -> None:
    with ServerProcess("--backend", "eager", "--cache-dir", str(tmp_path)) as alone:
        alone.wait_for(lambda: alone.call("/livez")[0] == 200)
        documents = [each.call("/openapi.json")[1] for each in (server, alone)]
    assert documents[0] == documents[1]
    assert server.call("/readyz")[1] == {"state": "ready", "phase": "ready"}
    assert server.call("/")[0] == 200


def test_errors_and_ids_come_through(server: RayServer) -> None:
    status, problem, _ = server.call("/v1/caption", b"no image", {"X-Request-Id": "mine"})
    assert (status, problem["status"]) == (422, 422)
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/livez", headers={"X-Request-Id": "mine"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.headers.get_all("X-Request-Id") == ["mine"]


def test_ray_exports_the_metrics_of_every_replica(server: RayServer) -> None:
    """Through the agent of its node, whose address is in Ray's own list for Prometheus."""
    (targets,) = json.loads(next(Path(server._sessions).rglob("prom_metrics_service_discovery.json")).read_text())
    found: set[str] = set()
    end = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < end:
        for target in targets["targets"]:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as reply:
                lines = reply.read().decode().splitlines()
            found |= {
                replica[1]
                for line in lines
                if line.startswith("ray_snapcap_ready{") and line.endswith(" 1.0")
                if (replica := re.search(r'replica="([^"]+)"', line))
            }
        time.sleep(1)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"colour": "red"}, "unknown environment variable SNAPCAP_COLOUR"),
        ({"buckets": "4,1"}, "increasing order"),
        ({"port": 9000}, "port has no meaning on Ray"),
        ({"metrics_port": 9090}, "metrics_port has no meaning on Ray"),
        ({"decode_processes": 2}, "decode_processes has no meaning on Ray"),
    ],
)
def test_an_option_that_is_wrong_stops_the_deployment(options: dict[str, Any], sentence: str) -> None:
    from snapcap.service.config.reader import SettingsError
    from snapcap.service.server.ray.replica import application

    with pytest.raises(SettingsError, match=sentence):
        application(options)


def test_a_replica_whose_device_has_failed_is_unhealthy() -> None:
    from snapcap.service.server.ray.replica import Replica

    replica = Replica.__new__(Replica)
    replica._exits = ExitStack()
    replica._services = SimpleNamespace(readiness=Readiness(lambda: "starting"))
    replica._services.readiness.ready()
    replica.check_health()
    replica._services.readiness.fail("the device failed several times in a row")
    with pytest.raises(RuntimeError, match="the device failed"):
        replica.check_health()


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from snapcap.service.server.ray import replica as ray_replica

    monkeypatch.setattr(ray_replica, "_share", dict)
    with pytest.raises(RuntimeError, match=r"there is no folder '\./none'"):
        ray_replica.Replica({"SNAPCAP_MODEL": "./none", "SNAPCAP_CACHE_DIR": str(tmp_path)})
