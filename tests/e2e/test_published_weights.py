"""A machine that has never seen the model starts from one store: packages and weights, without torch's module."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from support.checkpoints.published import upload_checkpoint
from support.servers.server_process import ServerProcess, snapcap

from snapcap.benchmarks.harness.processes import descendants
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import client

PREPARED = ("--prepared-weights",)  # which tests' environment turns off


@dataclass(frozen=True)
class Remote:
    """A bucket with the demo model, and with what `snapcap build --weights` has published of it."""

    endpoint: str
    bucket: str
    source: str
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        return (
            *("--model", self.source, "--store", f"s3://{self.bucket}/snapcap", "--buckets", "1,4"),
            *("--trusted-key", f"{self.key}.pub", "--s3-endpoint-url", self.endpoint, "--s3-region", "us-east-1"),
        )

    def build(self, cache: Path, *more: str) -> str:
        run = snapcap(
            "build", *self.options, *PREPARED, "--sign-key", str(self.key), "--cache-dir", str(cache), *more
        )
        assert run.returncode == 0, run.stderr
        return run.stderr


@pytest.fixture
def publish(
    request: pytest.FixtureRequest, built_cache: Path, demo_folder: Path, tmp_path: Path
) -> Callable[[str], Remote]:
    """``publish("moto" | "ceph")``: on that server, with weights."""

    def make(kind: str) -> Remote:
        request.getfixturevalue("ceph_environment" if kind == "ceph" else "aws_environment")
        endpoint = request.getfixturevalue("ceph_server" if kind == "ceph" else "s3_server")
        s3, bucket = client(S3Options(endpoint_url=endpoint, region="us-east-1")), f"weights-{uuid4().hex}"
        s3.create_bucket(Bucket=bucket)
        assert snapcap("keygen", str(tmp_path / "artifacts.key")).returncode == 0
        source = upload_checkpoint(s3, demo_folder, bucket, "checkpoints/demo")
        remote = Remote(endpoint, bucket, source, tmp_path / "artifacts.key")
        # Only the packages, which nobody has signed there: the model is not on this machine.
        cache = tmp_path / "builder"
        shutil.copytree(built_cache / "store", cache / "store", ignore=shutil.ignore_patterns("builds", "weights"))
        said = remote.build(cache, "--allow-unsigned", "--weights")
        assert "weights published: " in said
        assert "MiB" in said
        return remote

    return make


@pytest.mark.parametrize("kind", ["ceph"])
def test_a_machine_that_has_nothing_starts_without_torch(
    kind: str, publish: Callable[[str], Remote], tmp_path: Path, samples: dict[Path, str]
) -> None:
    remote = publish(kind)
    options = (*remote.options, *PREPARED, "--cache-dir", str(tmp_path / "empty"), "--backend", "aot", "--strict")
    fetched = []
    for _ in range(2):
        with ServerProcess(*options) as server:
            startup = server.wait_ready().startup()
            assert (startup["tier"], startup["artifacts"]["result"]) == ("aot", "hit")
            assert startup["weights"]["result"] == "hit", startup["weights"]
            assert startup["torch_modules"] == 0
            assert "import_torch" not in [phase["name"] for phase in startup["phases"]]
            for path, caption in samples.items():
                assert server.caption(path)["caption"] == caption
            metrics = server.metrics()
            assert metrics['snapcap_startup_weights{result="hit"}'] == 1
            for pid in (server.process.pid, *descendants(server.process.pid)):
                assert "libtorch_python" not in Path(f"/proc/{pid}/maps").read_text()
            fetched.append((startup["weights"]["bytes_fetched"], startup["artifacts"]["bytes_fetched"]))
            store = tmp_path / "empty" / "store" / "weights"
            server.wait_for(lambda store=store: not list(store.glob(".[vw]*")))
    assert fetched[0][0] > 5_000_000
    assert fetched[1] == (0, 0)
    assert not (tmp_path / "empty" / "checkpoints").exists(), "no checkpoint was downloaded"
    # A build of what is published writes nothing; and explain shows it.
    again = remote.build(tmp_path / "builder", "--allow-unsigned", "--weights")
    assert "weights exists: " in again
    shown = snapcap("explain", *remote.options, "--cache-dir", str(tmp_path / "empty"))
    assert (shown.returncode, "weights hit: " in shown.stdout) == (0, True), shown.stdout
    assert "MiB" in shown.stdout


def test_weights_that_are_wrong_are_a_miss_and_the_checkpoint_serves(
    publish: Callable[[str], Remote], tmp_path: Path, samples: dict[Path, str]
) -> None:
    remote = publish("moto")
    s3 = client(S3Options(endpoint_url=remote.endpoint, region="us-east-1"))
    blobs = s3.list_objects_v2(Bucket=remote.bucket, Prefix="snapcap/blobs/")["Contents"]
    name = max(blobs, key=lambda entry: entry["Size"])["Key"]
    body = bytearray(s3.get_object(Bucket=remote.bucket, Key=name)["Body"].read())
    body[-1] ^= 1
    s3.put_object(Bucket=remote.bucket, Key=name, Body=bytes(body))
    options = (*remote.options, *PREPARED, "--cache-dir", str(tmp_path / "empty"), "--build", "off")
    with ServerProcess(*options) as server:
        startup = server.wait_ready().startup()
        for path, caption in samples.items():
            assert server.caption(path)["caption"] == caption
        metrics = server.metrics()
    assert (startup["tier"], startup["weights"]["result"]) == ("aot", "corrupt")
    assert "chunk 0" in startup["weights"]["reason"]
    assert startup["torch_modules"] > 0
    assert metrics['snapcap_startup_weights{result="corrupt"}'] == 1
    assert any("chunk 0" in line and " warning " in line for line in server.log().splitlines())


def test_weights_of_a_folder_are_not_published(tmp_path: Path) -> None:
    run = snapcap("build", "--weights", "--prepared-weights", "--cache-dir", str(tmp_path))
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert "upload it to S3" in line
    run = snapcap(
        "build", "--weights", "--no-prepared-weights", "--model", "s3://x/y", "--cache-dir", str(tmp_path)
    )
    assert (run.returncode, "--no-prepared-weights" in run.stderr) == (1, True)
