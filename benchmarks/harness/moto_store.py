"""Serves a signed artifact set from an S3 server on loopback (moto, in its own process)."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapcap.benchmarks.harness.common import build_store, environment, free_port, run_snapcap

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
# A process of its own, as S3 is: a server inside the measuring process would share its interpreter lock.
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
    """The options and environment with which a server finds the set."""

    options: tuple[str, ...]
    environment: dict[str, str]


@contextlib.contextmanager
def s3_artifacts(cache: Path, folder: Path, options: tuple[str, ...] = ()) -> Iterator[S3Artifacts]:
    """The set that `cache` holds, signed and published; keys go to `folder`. `options` name the model."""
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
        boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        ).create_bucket(Bucket=_BUCKET)
        if not key.exists():
            run_snapcap("keygen", str(key))
        store = ("--store", f"s3://{_BUCKET}/snapcap", "--s3-endpoint-url", endpoint)
        trusted = ("--trusted-key", f"{key}.pub")
        build_store(cache, *options, *store, "--sign-key", str(key), *trusted, extra=_CREDENTIALS)
        yield S3Artifacts((*store, *trusted), _CREDENTIALS)
    finally:
        process.terminate()
        process.wait()
