"""Artifacts in S3: published once and signed, fetched by machines that have nothing; and every way it can fail."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import pytest
from support.servers.server_process import ServerProcess, snapcap

from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import client

BUCKETS = ("--buckets", "1,4")


@dataclass(frozen=True)
class Remote:
    """A bucket with a published set, and the key of who signed it. Shared by all tests: whoever changes it takes a
    copy."""

    endpoint: str
    bucket: str
    key: Path

    @property
    def public(self) -> Path:
        return Path(f"{self.key}.pub")

    @property
    def store(self) -> tuple[str, ...]:
        return self.at(f"s3://{self.bucket}/snapcap")

    @property
    def trusting(self) -> tuple[str, ...]:
        return (*self.store, "--trusted-key", str(self.public))

    def at(self, address: str) -> tuple[str, ...]:
        return ("--store", address, "--s3-endpoint-url", self.endpoint, "--s3-region", "us-east-1", *BUCKETS)

    def copy(self, name: str = "") -> "Remote":
        """Another bucket with the same objects."""
        s3, other = client(S3Options(endpoint_url=self.endpoint, region="us-east-1")), name or f"copy-{uuid4().hex}"
        s3.create_bucket(Bucket=other)
        for each in s3.list_objects_v2(Bucket=self.bucket)["Contents"]:
            s3.copy_object(Bucket=other, Key=each["Key"], CopySource={"Bucket": self.bucket, "Key": each["Key"]})
        return replace(self, bucket=other)


@pytest.fixture(scope="module")
def published() -> dict[str, Remote]:
    """By the kind of server, filled by the first test that asks for one."""
    return {}


@pytest.fixture
def remote(
    request: pytest.FixtureRequest,
    built_cache: Path,
    published: dict[str, Remote],
    tmp_path_factory: pytest.TempPathFactory,
    s3_kind: str,
) -> Remote:
    """A bucket into which `snapcap build` has published what another cache holds already."""
    request.getfixturevalue("ceph_environment" if s3_kind == "ceph" else "aws_environment")
    endpoint = request.getfixturevalue("ceph_server" if s3_kind == "ceph" else "s3_server")
    if s3_kind not in published:
        published[s3_kind] = publish(endpoint, built_cache, tmp_path_factory.mktemp("builder"))
    return published[s3_kind]


def publish(endpoint: str, built_cache: Path, folder: Path) -> Remote:
    bucket = f"start-{uuid4().hex}"
    client(S3Options(endpoint_url=endpoint, region="us-east-1")).create_bucket(Bucket=bucket)
    remote = Remote(endpoint, bucket, folder / "artifacts.key")
    assert snapcap("keygen", str(remote.key)).returncode == 0
    # Nobody has signed that set, and a copy of it is not vouched for as what was built in its folder is.
    vouching = (*remote.trusting, "--allow-unsigned", "--sign-key", str(remote.key))
    run = snapcap("build", *vouching, "--cache-dir", str(copied(built_cache, folder / "builder")))
    assert run.returncode == 0, run.stderr
    assert f"s3://{bucket}/snapcap" in run.stderr
    return remote


@pytest.fixture
def s3_kind() -> str:
    """Which S3 server; moto unless a test is parametrized."""
    return "moto"


def copied(cache: Path, target: Path) -> Path:
    """The published part of a cache's store, without the build's own folder."""
    shutil.copytree(cache / "store", target / "store", ignore=shutil.ignore_patterns("builds"))
    return target


def backends(server: ServerProcess) -> set[tuple[str, str]]:
    return {(bucket["backend"], bucket["state"]) for bucket in server.startup()["buckets"]}


@pytest.mark.parametrize("s3_kind", ["moto", "ceph"])
def test_a_machine_that_has_nothing_starts_compiled_and_downloads_once(
    remote: Remote, tmp_path: Path, samples: dict[Path, str]
) -> None:
    options = (*remote.trusting, "--cache-dir", str(tmp_path / "empty"))
    with ServerProcess(*options) as server:
        artifacts = server.wait_ready().startup()["artifacts"]
        assert (artifacts["result"], backends(server)) == ("hit", {("aot", "warm")})
        assert artifacts["bytes_fetched"] > 100_000
        for path, caption in samples.items():
            reply = server.caption(path)
            assert (reply["caption"], reply["backend"]) == (caption, "aot")
        metrics = server.metrics()
    assert metrics["snapcap_artifact_fetch_bytes"] == artifacts["bytes_fetched"]
    assert metrics['snapcap_artifact_requests_total{kind="aot",result="hit"}'] == 1
    assert metrics["snapcap_artifact_fetch_duration_seconds"] > 0
    with ServerProcess(*options) as server:
        again = server.wait_ready().startup()
    assert (again["tier"], again["artifacts"]["bytes_fetched"]) == ("aot", 0)
    # A build that could not sign what it publishes stops before it compiles.
    build = snapcap("build", *remote.trusting, "--cache-dir", str(tmp_path / "empty"))
    assert build.returncode == 1
    assert "--sign-key KEY" in build.stderr


def test_a_second_build_of_what_is_published_compiles_and_writes_nothing(remote: Remote, tmp_path: Path) -> None:
    s3 = client(S3Options(endpoint_url=remote.endpoint, region="us-east-1"))
    before = s3.list_objects_v2(Bucket=remote.bucket)["Contents"]
    options = ("--sign-key", str(remote.key), "--cache-dir", str(tmp_path / "other"))
    build = snapcap("build", *remote.trusting, *options, CXX="no-such-compiler")
    assert build.returncode == 0, build.stderr
    assert "exists: " in build.stderr
    assert s3.list_objects_v2(Bucket=remote.bucket)["Contents"] == before


def flip_a_byte(remote: Remote, tmp_path: Path) -> tuple[str, ...]:
    remote = remote.copy()
    s3 = client(S3Options(endpoint_url=remote.endpoint, region="us-east-1"))
    for pack in s3.list_objects_v2(Bucket=remote.bucket, Prefix="snapcap/blobs/packs/")["Contents"]:
        s3.delete_object(Bucket=remote.bucket, Key=pack["Key"])  # or it would stand in for the blob
    listed = s3.list_objects_v2(Bucket=remote.bucket, Prefix="snapcap/blobs/sha256/")["Contents"]
    name = listed[0]["Key"]
    body = bytearray(s3.get_object(Bucket=remote.bucket, Key=name)["Body"].read())
    body[len(body) // 2] ^= 1
    s3.put_object(Bucket=remote.bucket, Key=name, Body=bytes(body))
    return remote.trusting


def a_stranger(remote: Remote, tmp_path: Path) -> tuple[str, ...]:
    assert snapcap("keygen", str(tmp_path / "other.key")).returncode == 0
    return (*remote.store, "--trusted-key", str(tmp_path / "other.key.pub"))


def no_bucket(remote: Remote, tmp_path: Path) -> tuple[str, ...]:
    return (*remote.at("s3://no-such-bucket/snapcap"), "--trusted-key", str(remote.public))


def other_factors(remote: Remote, tmp_path: Path) -> tuple[str, ...]:
    return (*remote.trusting, "--buckets", "1,2")


@pytest.mark.parametrize(
    ("damage", "result", "sentence"),
    [
        (flip_a_byte, "corrupt", "its content is not that of its name"),
        (a_stranger, "untrusted", "sign"),
        (no_bucket, "error", "no-such-bucket"),
        (other_factors, "miss", "model.buckets is [1, 2] here and [1, 4] there"),
    ],
)
def test_artifacts_that_cannot_be_used_are_named_and_eager_serves(
    remote: Remote,
    tmp_path: Path,
    samples: dict[Path, str],
    damage: Callable[[Remote, Path], tuple[str, ...]],
    result: str,
    sentence: str,
) -> None:
    expect_eager((*damage(remote, tmp_path), "--build", "off"), tmp_path, samples, result, sentence)


@pytest.mark.parametrize("s3_kind", ["ceph"])
def test_wrong_credentials_are_named_and_eager_serves(
    remote: Remote, tmp_path: Path, samples: dict[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    expect_eager((*remote.trusting, "--build", "off"), tmp_path, samples, "error", "SignatureDoesNotMatch")


def test_an_endpoint_that_never_answers_holds_the_start_up_for_its_deadline_only(
    aws_environment: None, black_hole: str, tmp_path: Path, samples: dict[Path, str]
) -> None:
    assert snapcap("keygen", str(tmp_path / "key")).returncode == 0
    store = Remote(black_hole, "bucket", tmp_path / "key").trusting
    options = (*store, "--build", "off", "--store-deadline", "2")
    expect_eager(options, tmp_path, samples, "error", " 2 s")  # said by the worker or its parent


def test_a_store_that_could_not_be_read_is_asked_again_and_its_code_swapped_in(
    remote: Remote, tmp_path: Path, samples: dict[Path, str]
) -> None:
    late = replace(remote, bucket=f"late-{uuid4().hex}")

    def build() -> str:
        return str((server.startup()["build"] or {}).get("state"))

    with ServerProcess(*late.trusting, "--build", "off", "--cache-dir", str(tmp_path)) as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"]) == ("eager", "error")
        server.wait_for(lambda: build() == "looking")
        remote.copy(late.bucket)
        server.wait_for(lambda: build() == "fetched")
        assert backends(server) == {("aot", "warm")}
        path, caption = next(iter(samples.items()))
        reply = server.caption(path)
        assert (reply["caption"], reply["backend"]) == (caption, "aot")
        assert server.metrics()['snapcap_artifact_requests_total{kind="aot",result="hit"}'] == 1
    assert "the store is asked again" in server.log()


def expect_eager(
    options: tuple[str, ...], tmp_path: Path, samples: dict[Path, str], result: str, sentence: str
) -> None:
    """The start serves eager, and says why in `/startup`, in the metric and in the log."""
    with ServerProcess(*options, "--cache-dir", str(tmp_path / "empty")) as server:
        startup = server.wait_ready().startup()
        path, caption = next(iter(samples.items()))
        assert server.caption(path)["caption"] == caption
        metrics = server.metrics()
    assert (startup["tier"], startup["artifacts"]["result"]) == ("eager", result)
    assert sentence in startup["artifacts"]["reason"]
    assert metrics[f'snapcap_artifact_requests_total{{kind="aot",result="{result}"}}'] == 1
    (line,) = [line for line in server.log().splitlines() if "no artifacts" in line and " result=" in line]
    assert sentence in line


def test_s3_without_a_trusted_key_is_refused(aws_environment: None, s3_server: str, tmp_path: Path) -> None:
    store = Remote(s3_server, "bucket", tmp_path / "none").store
    with ServerProcess(*store, "--cache-dir", str(tmp_path)) as server:
        assert server.process.wait(timeout=60) == 3
    (line,) = [line for line in server.log().splitlines() if " error " in line]
    assert "--trusted-key" in line


def test_without_a_key_to_sign_with_auto_declines_and_names_the_command(remote: Remote, tmp_path: Path) -> None:
    with ServerProcess(*other_factors(remote, tmp_path), "--cache-dir", str(tmp_path / "empty")) as server:
        server.wait_ready()
        server.wait_for(lambda: server.startup()["build"] is not None)
        build = server.startup()["build"]
        assert backends(server) == {("eager", "eager")}
    assert build["state"] == "declined"
    assert build["command"].startswith(f"snapcap build --model demo --store s3://{remote.bucket}/snapcap")
    assert build["command"] in server.log()
