"""A server on a full disk: it serves what it can, and ends with one line where it cannot."""

import os
from pathlib import Path

import pytest
from support.servers.server_process import ServerProcess, snapcap
from support.servers.small_disk import SMALL

from snapcap.warmup.artifacts.manifest import describe_all, new_manifest
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import Signer, load_signer
from snapcap.warmup.options import ComputeOptions, ModelOptions, S3Options, StartOptions
from snapcap.warmup.plan.checkpoint import read_checkpoint
from snapcap.warmup.plan.plan import make_plan
from snapcap.warmup.s3.client import client

BUCKETS = ("--device", "cpu", "--buckets", "1")


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    assert snapcap("keygen", str(tmp_path / "key")).returncode == 0
    return load_signer(tmp_path / "key")


def test_artifacts_that_find_no_space_leave_a_server_that_is_eager_and_says_why(
    s3_server: str,
    aws_environment: None,
    small_disk: Path,
    tmp_path: Path,
    signer: Signer,
    samples: dict[Path, str],
) -> None:
    options = StartOptions(ModelOptions(cache_dir=tmp_path), ComputeOptions("cpu", buckets=(1,)))
    config = read_checkpoint(options).config
    factors = make_plan(config, options).factors(config, "aot")
    store = S3Store.open("s3://full/store", S3Options(endpoint_url=s3_server, region="us-east-1"))
    store.s3.create_bucket(Bucket="full")
    (tmp_path / "large").write_bytes(os.urandom(2 * SMALL))
    files = {"aot/large.b1.pt2": tmp_path / "large"}
    published = publish(store, new_manifest("aot", factors, describe_all(files)), files, signer)
    assert published.result == "published", published.reason

    arguments = (*BUCKETS, "--cache-dir", str(small_disk), "--store", "s3://full/store", "--build", "off")
    s3 = ("--s3-endpoint-url", s3_server, "--s3-region", "us-east-1", "--trusted-key", str(tmp_path / "key.pub"))
    with ServerProcess(*arguments, *s3) as server:
        startup = server.wait_ready().startup()
        image, caption = next(iter(samples.items()))
        reply = server.caption(image)
        counted = server.metrics()['snapcap_artifact_requests_total{kind="aot",result="error"}']
        log = server.log()
    assert (reply["caption"], reply["backend"], counted) == (caption, "eager", 1)
    assert startup["artifacts"]["result"] == "error"
    for word in ("s3://full/store/blobs/sha256/", str(small_disk), "No space left", "choose another folder"):
        assert word in startup["artifacts"]["reason"]
    assert "No space left" in log
    assert "Traceback" not in log


def test_a_checkpoint_that_finds_no_space_ends_the_start_with_a_line(
    s3_server: str, aws_environment: None, small_disk: Path, demo_folder: Path
) -> None:
    s3 = client(S3Options(endpoint_url=s3_server, region="us-east-1"))
    s3.create_bucket(Bucket="models")
    for path in demo_folder.iterdir():
        if path.is_file():
            s3.put_object(Bucket="models", Key=f"x/{path.name}", Body=path.read_bytes())
    s3.put_object(Bucket="models", Key="x/model.safetensors", Body=bytes(2 * SMALL))
    run = snapcap(
        "serve", "--port", "0", *BUCKETS, "--model", "s3://models/x", "--cache-dir", str(small_disk),
        "--s3-endpoint-url", s3_server, "--s3-region", "us-east-1", timeout=120,
    )  # fmt: skip
    assert run.returncode == 3
    logged, said = [line for line in run.stderr.splitlines() if "No space left" in line]
    assert said.startswith("snapcap: ")
    for word in ("s3://models/x", str(small_disk), "--cache-dir"):
        assert word in logged
        assert word in said
    assert "Traceback" not in run.stderr
    assert list(small_disk.rglob("*.part")) == []
