"""Serves a signed artifact set from an S3 server on loopback (moto, in a process of its own)."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.benchmarks.harness.workload import build_store, environment, free_port, run_snapcap
from snapcap.warmup.checkpoints.local import checkpoint_names

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1,localhost",
}
_BUCKET = "bench"
_DOWNLOADS = 3
# S3 is another process too. A server inside the measuring process would share its interpreter lock.
_MOTO = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
server.start()
print("up", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class S3Artifacts:
    """The options and environment with which a server finds the set.

    link_s: seconds in which a plain client downloads the published weights; 0 if none were published.
    """

    options: tuple[str, ...]
    environment: dict[str, str]
    link_s: float = 0.0


def _uploaded(s3: "S3Client", checkpoint: Path) -> str:
    """Uploads the files of a folder to S3, and returns their source for `--model`."""
    names = [path.name for path in checkpoint.iterdir()]
    for name in checkpoint_names(names, lambda index: (checkpoint / index).read_bytes()):
        s3.upload_file(str(checkpoint / name), _BUCKET, f"model/{name}")
    return f"s3://{_BUCKET}/model"


def _plain_download_s(s3: "S3Client") -> float:
    """Returns the seconds to download the largest blob, the weights, over one connection: the fastest of some
    downloads."""
    blobs = s3.list_objects_v2(Bucket=_BUCKET, Prefix="snapcap/blobs/")["Contents"]
    key = max(blobs, key=lambda blob: blob["Size"])["Key"]
    seconds = []
    for _ in range(_DOWNLOADS):
        began = time.monotonic()
        for _piece in s3.get_object(Bucket=_BUCKET, Key=key)["Body"].iter_chunks(1 << 20):
            pass
        seconds.append(time.monotonic() - began)
    return min(seconds)


@contextlib.contextmanager
def s3_artifacts(
    cache: Path, folder: Path, options: tuple[str, ...] = (), checkpoint: Path | None = None
) -> Iterator[S3Artifacts]:
    """Publishes and signs the artifact set that `cache` holds, and yields how to find it. Keys go to `folder`.

    `options` name the model. With a `checkpoint`, they lack the model's name: the checkpoint is uploaded to S3,
    and published with its weights.
    """
    import boto3

    key = folder / "bench.key"
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(**_CREDENTIALS),
    )
    try:
        if process.stdout is None or process.stdout.readline().strip() != "up":
            raise RuntimeError("moto did not start; install the development requirements: make setup")
        endpoint = f"http://127.0.0.1:{port}"
        s3 = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )
        s3.create_bucket(Bucket=_BUCKET)
        if not key.exists():
            run_snapcap("keygen", str(key))
        store = ("--store", f"s3://{_BUCKET}/snapcap", "--s3-endpoint-url", endpoint)
        trusted: tuple[str, ...] = ("--trusted-key", f"{key}.pub")
        signing: tuple[str, ...] = ("--sign-key", str(key))
        if checkpoint is not None:
            trusted += ("--model", _uploaded(s3, checkpoint))
            signing += ("--weights",)
        build_store(cache, *options, *store, *signing, *trusted, extra=_CREDENTIALS)
        link = 0.0 if checkpoint is None else _plain_download_s(s3)
        yield S3Artifacts((*store, *trusted), _CREDENTIALS, link)
    finally:
        process.terminate()
        process.wait()
