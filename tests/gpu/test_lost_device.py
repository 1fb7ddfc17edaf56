"""A real server whose device breaks: one that is lost ends it within seconds, one without memory goes on."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.servers import faulty_server as faults
from support.servers.device_starts import BUCKETS, PREPARED
from support.servers.faulty_server import FaultyServer

PATIENCE = 60.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=["eager", "without torch"])
def server(
    request: pytest.FixtureRequest, served: None, device: torch.device, tmp_path: Path
) -> Iterator[FaultyServer]:
    options: tuple[str, ...] = ("--backend", "eager", "--cache-dir", str(tmp_path))
    prepared = {}
    if request.param == "without torch":
        options, prepared = ("--backend", "aot", "--cache-dir", str(request.getfixturevalue("built"))), PREPARED
    with FaultyServer(tmp_path, *options, *BUCKETS, "--device", device.type, **prepared) as process:
        process.wait_ready()
        assert (process.startup()["torch_modules"] == 0) == bool(prepared)
        yield process


def test_a_kernel_that_asserts_ends_the_server_within_seconds(
    server: FaultyServer, device: torch.device, samples: dict[Path, str]
) -> None:
    path = next(iter(samples))
    server.caption(path)
    server.switch(faults.ASSERT)
    began = time.monotonic()
    # A CPU answers after such an error, and has three attempts. Who had the last one may ask another server.
    expected = [503] if device.type == "cuda" else [500, 500, 503]
    assert [server.call("/v1/caption", path.read_bytes())[0] for _ in expected] == expected
    assert server.process.wait(PATIENCE) == 4
    assert time.monotonic() - began < 30, "without the watchdog, which would take longer"
    (line,) = [line for line in server.log().splitlines() if " error   failed " in line]
    lost, failed = "the device is lost: ", "the device failed 3 times in a row"
    assert (lost if device.type == "cuda" else failed) in line


def test_a_device_without_memory_fails_requests_and_serves_when_it_has_some(
    server: FaultyServer, samples: dict[Path, str]
) -> None:
    path, caption = next(iter(samples.items()))
    with server.fault(faults.NO_MEMORY):
        for _ in range(6):
            status, body, _ = server.call("/v1/caption", path.read_bytes())
            assert (status, body["code"]) == (500, "internal_error")
        assert server.call("/readyz")[0] == 200
    assert server.caption(path)["caption"] == caption


def test_memory_that_another_holds_for_a_while_costs_nobody_the_server(
    server: FaultyServer, device: torch.device, samples: dict[Path, str]
) -> None:
    """All that is left on the device, down to what an allocation needs at least."""
    if device.type == "cpu":
        pytest.skip("a CPU's memory is not filled here")
    path, caption = next(iter(samples.items()))
    held: list[torch.Tensor] = []
    size = 1 << 36
    while size >= 1 << 21:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    # Sampling and beams allocate while they run; greedy has all it needs since the start.
    for query in ("", "?temperature=1&seed=1", "?num_beams=4"):
        assert server.call(f"/v1/caption{query}", path.read_bytes())[0] in (200, 500), query
    held.clear()
    torch.cuda.empty_cache()
    assert server.caption(path)["caption"] == caption
    server.caption(path, "?num_beams=4")
    assert server.call("/readyz")[0] == 200
