"""A card of which another process holds the rest: a build fits into what is free, and so does a start."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from support.servers.device_starts import servable
from support.servers.server_process import ServerProcess

from snapcap.benchmarks.harness.random_checkpoint import RANDOM_MODELS, write_checkpoint

pytestmark = pytest.mark.timeout(600)  # compiling a model of real size
GIB = 1 << 30


@pytest.fixture
def leaving(device: torch.device) -> Callable[[float], object]:
    """``with leaving(gib)``: so much of the card is free inside the block."""
    if device.type != "cuda":
        pytest.skip("NO CUDA DEVICE HERE: NOTHING IS CHECKED ON A GPU")

    def settled() -> int:
        """Bytes that are free, once a process that has ended has given back all that it held."""
        free, seen = torch.cuda.mem_get_info(device)[0], -1
        while free != seen:
            time.sleep(1)
            seen, free = free, torch.cuda.mem_get_info(device)[0]
        return free

    @contextmanager
    def held(gib: float) -> Iterator[None]:
        torch.cuda.empty_cache()
        free = settled()
        with ExitStack() as scope:
            if free > gib * GIB:
                rest = [torch.empty(free - int(gib * GIB), dtype=torch.uint8, device=device)]
                scope.callback(torch.cuda.empty_cache)
                scope.callback(rest.clear)
            yield

    return held


def states(server: ServerProcess) -> set[tuple[str, str]]:
    return {(bucket["backend"], bucket["state"]) for bucket in server.startup()["buckets"]}


@pytest.mark.skipif(not servable(), reason="NO FASTAPI HERE: NO SERVER IS STARTED")
def test_a_model_of_real_size_on_a_card_of_24_gb(leaving: Callable[[float], ExitStack], tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    write_checkpoint(RANDOM_MODELS["vit-b16-gpt2"], folder)
    options = ("--model", str(folder), "--cache-dir", str(cache))
    with leaving(22):
        command = [sys.executable, "-m", "snapcap", "build", *options]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr[-2000:]
        assert "buckets 1,4,16,64" in built.stderr
        with ServerProcess(*options, "--backend", "aot", "--strict") as server:
            server.wait_ready()
            assert 256 in {bucket["size"] for bucket in server.startup()["buckets"]}
            server.wait_for(lambda: states(server) == {("aot", "captured")}, seconds=60)  # step buckets come later
    with leaving(2.2), ServerProcess(*options, "--build", "off") as server:
        server.wait_ready()
        sizes = {bucket["size"] for bucket in server.startup()["buckets"]}
        assert 1 in sizes
        assert 64 not in sizes
        assert "is left out" in server.log()
