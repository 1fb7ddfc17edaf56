"""`snapcap serve` with the demo model, in a process of its own: the start, every way in, overload and the end."""

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.servers.server_process import ServerProcess, python

METRICS = (
    "snapcap_build_info",
    "snapcap_model_info",
    "snapcap_lifecycle_state",
    "snapcap_ready",
    "snapcap_process_start_to_live_seconds",
    "snapcap_process_start_to_ready_seconds",
    "snapcap_process_start_to_first_caption_seconds",
    "snapcap_startup_phase_duration_seconds",
    "snapcap_startup_tier",
    "snapcap_warmup_bucket_duration_seconds",
    "snapcap_warmup_buckets_expected",
    "snapcap_warmup_buckets_completed",
    "snapcap_requests_total",
    "snapcap_request_duration_seconds_count",
    "snapcap_queue_wait_seconds_count",
    "snapcap_queue_capacity",
    "snapcap_encode_batch_size_count",
    "snapcap_decode_batch_size_count",
    "snapcap_rows_total",
    "snapcap_image_decode_seconds_count",
    "snapcap_step_duration_seconds_count",
    "snapcap_generated_tokens_total",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with ServerProcess("--backend", "eager", "--cache-dir", cache) as process:
        yield process.wait_ready()


def multipart(parts: list[tuple[str, bytes]]) -> tuple[bytes, dict[str, str]]:
    lines = []
    for name, data in parts:
        head = f'--frontier\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
        lines.append(head.encode() + data + b"\r\n")
    return b"".join(lines) + b"--frontier--\r\n", {"Content-Type": "multipart/form-data; boundary=frontier"}


def test_livez_answers_before_torch_has_been_imported(tmp_path: Path) -> None:
    with ServerProcess("--backend", "eager", "--cache-dir", str(tmp_path)) as process:
        process.wait_for(lambda: process.call("/livez")[0] == 200)
        status, body, _ = process.call("/readyz")
        assert (status, body["state"]) == (503, "starting")
        refused, problem, headers = process.call("/v1/caption", b"x")
        assert (refused, problem["status"]) == (503, 503)
        assert "Retry-After" in {name.title() for name in headers}
        process.wait_ready()
        startup = process.startup()
    ends = {phase["name"]: phase["end"] for phase in startup["phases"]}
    assert startup["marks"]["live"] < ends["import_torch"] < startup["marks"]["ready"]
    assert startup["tier"] == "eager"


def test_every_sample_in_every_body_form(server: ServerProcess, samples: dict[Path, str]) -> None:
    for path, caption in samples.items():
        data = path.read_bytes()
        assert server.caption(path)["caption"] == caption
        status, body, _ = server.call("/v1/caption", *multipart([("image", data)]))
        assert (status, body["caption"]) == (200, caption)
        message = json.dumps({"image": base64.b64encode(data).decode()}).encode()
        status, body, _ = server.call("/v1/caption", message, {"Content-Type": "application/json"})
        assert (status, body["caption"], body["finish_reason"]) == (200, caption, "stop")


def test_several_images_in_one_request(server: ServerProcess, samples: dict[Path, str]) -> None:
    parts = [("image", path.read_bytes()) for path in samples]
    status, body, _ = server.call("/v1/captions", *multipart([*parts, ("image", b"not an image")]))
    assert status == 200
    *good, bad = body["captions"]
    assert [item["caption"] for item in good] == list(samples.values())
    assert bad["status"] == 422


def test_sixteen_clients_at_once_get_their_own_captions(server: ServerProcess, samples: dict[Path, str]) -> None:
    before = server.metrics()
    paths = list(samples) * 4
    with ThreadPoolExecutor(16) as pool:
        captions = list(pool.map(lambda path: server.caption(path)["caption"], paths))
    assert captions == [samples[path] for path in paths]
    after = server.metrics()
    rows = 'snapcap_rows_total{component="decoder"}'
    assert after[rows] > before.get(rows, 0.0)
    largest = 'snapcap_step_duration_seconds_count{bucket="8",component="decoder"}'
    assert after[largest] > before.get(largest, 0.0), "concurrent requests must share a step"


def test_a_prompt_is_continued_and_a_seed_repeats(server: ServerProcess, samples: dict[Path, str]) -> None:
    path = next(iter(samples))
    assert server.caption(path, "?prompt=a%20small")["caption"].startswith("a small")
    sampled = [server.caption(path, "?temperature=1.5&seed=7")["caption"] for _ in range(3)]
    assert len(set(sampled)) == 1
    # A beginning that no caption has leaves the model undecided.
    different = {server.caption(path, f"?temperature=2&seed={seed}&prompt=gray")["caption"] for seed in range(8)}
    assert len(different) > 1


def test_every_metric_is_there_and_set(server: ServerProcess, samples: dict[Path, str]) -> None:
    server.caption(next(iter(samples)))
    metrics = server.metrics()
    for name in METRICS:
        values = [value for sample, value in metrics.items() if sample.partition("{")[0] == name]
        assert values, name
        assert any(value > 0 for value in values), name
    assert metrics["snapcap_ready"] == 1
    assert metrics["snapcap_warmup_buckets_completed"] == metrics["snapcap_warmup_buckets_expected"] == 6


def test_full_queue_is_429_and_a_passed_deadline_504(
    compiled_options: tuple[str, ...], samples: dict[Path, str]
) -> None:
    options = (*compiled_options, "--queue-size", "1")
    data = next(iter(samples)).read_bytes()
    with ServerProcess(*options) as process:
        process.wait_ready()
        with ThreadPoolExecutor(24) as pool:
            replies = list(pool.map(lambda _: process.call("/v1/caption", data), range(48)))
        statuses = [status for status, _, _ in replies]
        assert set(statuses) == {200, 429}
        refused = replies[statuses.index(429)]
        assert refused[1]["error"] == refused[1]["detail"]
        assert int({name.title(): value for name, value in refused[2].items()}["Retry-After"]) >= 1
        assert process.call("/v1/caption?timeout=0.0001", data)[0] == 504
        # Its image, which may still be decoded, has the one place.
        process.wait_for(lambda: statuses.append(process.call("/v1/caption", data)[0]) or statuses[-1] == 200)
        assert set(statuses) == {200, 429}
        rejected = process.metrics()
    assert rejected['snapcap_requests_rejected_total{reason="queue_full"}'] == statuses.count(429)
    assert rejected['snapcap_requests_rejected_total{reason="deadline_exceeded"}'] == 1


def test_sigterm_drains_and_a_stalled_upload_does_not_hold_the_exit(
    compiled_options: tuple[str, ...], samples: dict[Path, str]
) -> None:
    options = (*compiled_options, "--drain-delay", "3", "--grace-period", "2", "--body-timeout", "3600")
    path, caption = next(iter(samples.items()))
    with ServerProcess(*options) as process, socket.socket() as stalled:
        process.wait_ready()
        stalled.connect(("127.0.0.1", process.port))
        stalled.sendall(b"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nhalf")
        process.terminate()
        process.wait_for(lambda: process.call("/readyz")[0] == 503)
        assert process.caption(path)["caption"] == caption, "served while draining"
        assert process.process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--device", "cuda:7"), "cuda:7"),
        (("--cache-length", "4000"), "cache_length 4000"),
    ],
)
def test_a_start_that_cannot_succeed_ends_with_one_line(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    with ServerProcess("--cache-dir", str(tmp_path), *arguments) as process:
        assert process.process.wait(timeout=60) == 3
        lines = process.log().splitlines()
    errors = [line for line in lines if " error " in line]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert lines[-1].startswith("snapcap: ")
    assert sentence in lines[-1]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            "./no-such-folder",
            "there is no folder './no-such-folder'; give a folder, a hub id or s3://bucket/prefix",
        ),
        ("{empty}", "'{empty}' has no config.json; give the folder that save_pretrained wrote"),
        ("{hub}", "'{hub}' has no config.json, but '{hub}/snapshots/abc' has one; give that folder"),
        ("{trained}", "'{trained}' has no config.json, but '{trained}/checkpoint-500' has one; give that folder"),
        ("{file}", "'{file}' is a file; give the folder that holds config.json"),
        (
            "https://me:secret@example.com/me/model",
            "'https://…@example.com/me/model' is a URL; give the hub id, such as owner/name, a folder, or s3://…",
        ),
    ],
)
def test_a_wrong_folder_is_found_before_anything_is_forked(tmp_path: Path, model: str, sentence: str) -> None:
    names = {name: str(tmp_path / name) for name in ("empty", "file", "hub", "trained")}
    (tmp_path / "file").touch()
    for below in ("empty", "hub/snapshots/abc", "trained/checkpoint-500"):
        (tmp_path / below).mkdir(parents=True)
        (tmp_path / below / "config.json").touch()
    (tmp_path / "empty/config.json").unlink()
    program = """
import os, sys
def fork(): raise AssertionError("forked")
os.fork = fork
from snapcap.service.cli.main import main
main(sys.argv[1:])
"""
    run = python("-c", program, "serve", "--port", "0", "--model", model.format(**names))
    assert run.returncode == 3
    assert run.stderr.splitlines()[-1] == "snapcap: " + sentence.format(**names)
    assert "Traceback" not in run.stderr
