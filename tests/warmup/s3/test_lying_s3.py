"""A server that lies: no lie becomes a checkpoint, outlasts the deadline of a start, or fills the memory."""

import os
import time
from pathlib import Path

import pytest
from support.servers.lying_s3 import lying_s3
from support.servers.server_process import python

from snapcap.warmup.checkpoints.local import CheckpointError
from snapcap.warmup.checkpoints.source import resolve_checkpoint
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.download import PART_BYTES

pytestmark = pytest.mark.usefixtures("aws_environment")

PATIENCE = 45  # seconds: what hangs hangs for minutes


def attempt(url: str, cache: Path, deadline: float = 20) -> Path:
    return resolve_checkpoint("s3://bucket/x", cache, S3Options(endpoint_url=url, deadline=deadline))


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".snapcap-s3.json")


def test_a_server_that_does_not_lie(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    with lying_s3(content, "") as server:
        assert (attempt(server.url, tmp_path) / "config.json").read_bytes() == content


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("truncated", "config.json"),
        ("shorter than asked", "ranged reads"),
        ("longer than asked", "ranged reads"),
        ("no length", "ranged reads"),
        ("no etag", "was replaced"),
        ("other range", "was replaced"),
        ("other version", "was replaced"),
    ],
)
def test_no_lie_becomes_a_file(lie: str, said: str, tmp_path: Path) -> None:
    with lying_s3(os.urandom(PART_BYTES + 100_000), lie) as server:
        with pytest.raises(CheckpointError, match=said) as raised:
            attempt(server.url, tmp_path)
        assert "\n" not in str(raised.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("lie", ["drip", "endless pages", "endless listing", "dripping listing", "endless error"])
def test_a_server_without_end_is_given_up_and_the_process_ends(lie: str, tmp_path: Path) -> None:
    """In a process of its own, whose threads and memory are looked at from outside."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from snapcap.warmup.checkpoints.local import CheckpointError\n"
        "from snapcap.warmup.checkpoints.source import resolve_checkpoint\n"
        "from snapcap.warmup.options import S3Options\n"
        "options = S3Options(sys.argv[1], deadline=2.0)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: resolve_checkpoint('s3://bucket/x', Path(sys.argv[2]), options)\n"
        "except CheckpointError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    with lying_s3(os.urandom(1000), lie) as server:
        started = time.monotonic()
        run = python("-c", code, server.url, str(tmp_path), timeout=2 * PATIENCE)
        seconds = time.monotonic() - started
    assert (run.returncode, run.stderr) == (0, "")
    error, kilobytes = run.stdout.splitlines()
    assert "s3://bucket/x" in error or server.url in error
    assert seconds < PATIENCE
    assert int(kilobytes) < 150 * 1024, "of it about 60 are boto3"
    assert leftovers(tmp_path) == []
