"""Serves a signed artifact set from an S3 server on loopback (moto, in a process of its own)."""

import contextlib
import subprocess
import sys
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
    """The options and environment with which a server finds the set, and the port of the S3 server."""

    port: int
    options: tuple[str, ...]
    environment: dict[str, str]


def _uploaded(s3: "S3Client", checkpoint: Path) -> str:
    """Uploads the files of a folder to S3, and returns their source for `--model`."""
    names = [path.name for path in checkpoint.iterdir()]
    for name in checkpoint_names(names, lambda index: (checkpoint / index).read_bytes()):
        s3.upload_file(str(checkpoint / name), _BUCKET, f"model/{name}")
    return f"s3://{_BUCKET}/model"


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
            aws_access_key_id=_CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
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
        yield S3Artifacts(port, (*store, *trusted), _CREDENTIALS)
    finally:
        process.terminate()
        process.wait()
