"""`snapcap serve` configured by the environment, its metrics under mixed traffic, and a drain with work in it."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.server_process import ServerProcess, snapcap

PATIENCE = 60.0


@pytest.fixture(scope="module")
def sample(demo_folder: Path) -> tuple[Path, str]:
    captions = json.loads((demo_folder / "samples" / "captions.json").read_text())
    name = sorted(captions)[0]
    return demo_folder / "samples" / name, captions[name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(
        SNAPCAP_BACKEND="eager",
        SNAPCAP_CACHE_DIR=str(tmp_path_factory.mktemp("cache")),
        SNAPCAP_BUCKETS="3",
        SNAPCAP_QUEUE_SIZE="17",
        SNAPCAP_MAX_NEW_TOKENS="4",
        SNAPCAP_LOG_FORMAT="json",
    ) as process:
        yield process.wait_ready()


def test_variables_are_settings(server: ServerProcess, sample: tuple[Path, str]) -> None:
    assert [(b["component"], b["size"]) for b in server.startup()["buckets"]] == [("encoder", 3), ("decoder", 3)]
    assert server.metrics()["snapcap_queue_capacity"] == 17
    reply = server.caption(sample[0])
    assert (reply["tokens"], reply["finish_reason"]) == (4, "length")
    assert sample[1].startswith(reply["caption"])
    assert (server.caption(sample[0], "?max_new_tokens=40")["caption"]) == sample[1]


def test_metrics_move_as_the_traffic_does(server: ServerProcess, sample: tuple[Path, str]) -> None:
    def moved(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    before = server.metrics()
    server.caption(sample[0])
    assert server.call("/v1/caption", b"not an image")[0] == 422
    assert server.call("/v1/caption?timeout=0.0001", sample[0].read_bytes())[0] == 504
    after = server.metrics()
    assert moved('snapcap_requests_total{api="caption",code="200"}') == 1
    assert moved('snapcap_requests_total{api="caption",code="422"}') == 1
    assert moved('snapcap_requests_total{api="caption",code="504"}') == 1
    assert moved('snapcap_requests_rejected_total{reason="deadline_exceeded"}') == 1
    assert moved('snapcap_image_decode_failures_total{reason="not_an_image"}') == 1
    assert moved("snapcap_generated_tokens_total") >= 4
    # One image in a bucket of three: two of three rows are padding, in every batch and step.
    for component in ("encoder", "decoder"):
        rows = moved(f'snapcap_rows_total{{component="{component}"}}')
        assert rows > 0
        assert moved(f'snapcap_padding_rows_total{{component="{component}"}}') == rows * 2 / 3
        assert moved(f'snapcap_step_duration_seconds_count{{bucket="3",component="{component}"}}') == rows / 3
    # The image of the last may have been about to be queued when its time was over.
    server.wait_for(lambda: server.metrics()["snapcap_queue_depth"] == 0)
    assert after["snapcap_requests_in_flight"] == 0
    assert after["snapcap_device_memory_allocated_bytes"] == 0  # a CPU


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("SNAPCAP_PORT", "http", "SNAPCAP_PORT must be a whole number"),
        ("SNAPCAP_BUKETS", "1", "SNAPCAP_BUCKETS"),
        ("SNAPCAP_BACKEND", "fast", "one of auto, aot, jit, eager"),
    ],
)
def test_a_bad_variable_stops_the_start_with_one_line(variable: str, value: str, says: str) -> None:
    run = snapcap("serve", timeout=PATIENCE, **{variable: value})
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert says in line


def test_a_request_under_way_at_sigterm_is_answered(
    compiled_options: tuple[str, ...], sample: tuple[Path, str]
) -> None:
    data = sample[0].read_bytes()
    options = (*compiled_options, "--body-timeout", "3600", "--grace-period", "60")
    with ServerProcess(*options) as process, socket.socket() as client:
        process.wait_ready()
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", process.port))
        client.sendall(
            b"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:-9]
        )
        process.wait_for(lambda: process.metrics()["snapcap_requests_in_flight"] == 1)
        process.terminate()
        process.wait_for(lambda: process.call("/livez")[0] == 0)  # the listener is closed, the request goes on
        client.sendall(data[-9:])
        reply = client.makefile("rb").read()
        assert process.process.wait(timeout=PATIENCE) == 0
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["caption"] == sample[1]
