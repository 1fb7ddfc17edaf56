"""A server whose images are decoded by processes: what runs where, and what becomes of requests when they die."""

import base64
import io
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.parity.pictures import encoded, scene
from support.servers.server_process import ServerProcess, wait_until

from snapcap.benchmarks.harness.processes import children, is_gone
from snapcap.models.processing.image_formats import readable

PATIENCE = 60.0
JSON = {"Content-Type": "application/json"}
DEATHS = "snapcap_decode_process_deaths_total"
PROCESSES = ("--decode-processes", "2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that has torch."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with ServerProcess("--backend", "eager", "--cache-dir", cache, "--buckets", "1,4", *PROCESSES) as process:
        yield process.wait_ready()


@pytest.fixture
def sample(samples: dict[Path, str]) -> tuple[Path, str]:
    return next(iter(samples.items()))


def has(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


def test_only_what_decodes_has_pillow_and_it_has_no_numpy(server: ServerProcess, sample: tuple[Path, str]) -> None:
    server.caption(sample[0])
    grey = io.BytesIO()
    Image.fromarray(np.full((8, 8), 1 << 15, np.uint16)).save(grey, "PNG")  # of 16 bits, which Pillow would clip
    for _ in range(2):
        assert server.call("/v1/caption", grey.getvalue())[0] == 200
    http, engine, decoders = server.process.pid, server.engine_pid, server.decode_pids
    assert len(decoders) == 2
    for library, owners in (
        ("_imaging.", decoders),
        ("libtorch", [engine]),
        ("numpy", [engine]),
        ("tokenizers.", [http]),
    ):
        assert [pid for pid in (http, engine, *decoders) if has(pid, library)] == owners, library
    assert server.metrics()["snapcap_decode_processes"] == 2


def test_captions_and_problems_are_those_of_threads(server: ServerProcess, samples: dict[Path, str]) -> None:
    """The right captions are what `test_serve_process` finds with threads, and the sentences `test_bad_input`."""
    before = server.metrics().get('snapcap_image_decode_seconds_count{format="png"}', 0.0)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda path: server.caption(path)["caption"], samples))
    assert found == list(samples.values())
    after = server.metrics()
    assert after['snapcap_image_decode_seconds_count{format="png"}'] == before + len(samples)
    status, body, _ = server.call("/v1/caption", b"8BPS, as if")
    assert (status, body["reason"]) == (422, "unsupported_format")
    assert body["detail"] == f"Photoshop (PSD) images are not read; send {readable()}."
    assert server.metrics()['snapcap_image_decode_failures_total{reason="unsupported_format"}'] == 1


def test_every_format_is_captioned_in_its_process(server: ServerProcess, sample: tuple[Path, str]) -> None:
    path, caption = sample
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    kinds = {"GIF": {}, "BMP": {}, "TIFF": {"compression": "tiff_lzw"}, "AVIF": {"quality": 100}}
    for kind, more in kinds.items():
        # Each process imports what decodes it with its first such picture.
        for _ in range(4):
            assert server.call("/v1/caption", encoded(picture, kind, **more))[1]["caption"] == caption, kind
        assert server.metrics()[f'snapcap_image_decode_seconds_count{{format="{kind.lower()}"}}'] == 4
    fax = bytearray(encoded(scene(900, 900).convert("1"), "TIFF", compression="group4"))
    fax[200:3000:9] = bytes(len(fax[200:3000:9]))
    for _ in range(4):
        assert server.call("/v1/caption", bytes(fax))[0] in (200, 422)
    assert "Fax4Decode" not in server.log(), "what libtiff says of each row"


def test_a_stream_and_a_large_body(server: ServerProcess, sample: tuple[Path, str]) -> None:
    path, caption = sample
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    asked = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": content}]}
    status, text, _ = server.call("/v1/chat/completions", json.dumps(asked).encode(), JSON)
    assert status == 200
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks).strip() == caption
    large = path.read_bytes() + bytes(12 << 20)  # what follows the end of a PNG is not looked at
    assert server.call("/v1/caption", large)[1]["caption"] == caption


def test_a_process_that_is_killed_is_replaced_and_no_request_is_lost(
    server: ServerProcess, samples: dict[Path, str]
) -> None:
    paths, before = list(samples)[:4], server.decode_pids
    deaths = server.metrics()[DEATHS]
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(server.caption, path) for path in paths]
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 4)
        os.kill(before[0], signal.SIGKILL)
        server.wait_for(lambda: server.metrics()[DEATHS] == deaths + 1)
        os.kill(before[1], signal.SIGCONT)
        captions = [reply.result()["caption"] for reply in replies]
    assert captions == [samples[path] for path in paths]
    server.wait_for(lambda: server.metrics()["snapcap_decode_processes"] == 2)
    after = server.decode_pids
    assert len(after) == 2
    assert before[0] not in after
    assert before[1] in after
    (line,) = [line for line in server.log().splitlines() if "decode process ended" in line]
    assert f'pid={before[0]} how="by signal SIGKILL; ' in line


def test_nothing_is_left_when_the_server_is_killed(compiled_options: tuple[str, ...]) -> None:
    with ServerProcess(*compiled_options, *PROCESSES) as server:
        server.wait_ready()
        pids = [server.engine_pid, server.decode_parent_pid, *server.decode_pids]
        os.kill(pids[-1], signal.SIGSTOP)  # one that hangs does not see the end of its socket
        server.process.kill()
        server.process.wait()
        wait_until(lambda: all(is_gone(pid) for pid in pids))
    assert len(pids) == 4


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_without_their_parent_the_server_ends_and_says_so(compiled_options: tuple[str, ...], when: str) -> None:
    with ServerProcess(*compiled_options, *PROCESSES) as server:
        server.wait_for(lambda: server.call("/livez")[0] == 200)
        if when == "later":
            server.wait_ready()
        pids = [server.engine_pid, *server.decode_pids]
        os.kill(server.decode_parent_pid, signal.SIGKILL)
        assert server.process.wait(PATIENCE) in ((4,) if when == "later" else (3, 4))
        (line,) = [line for line in server.log().splitlines() if " error " in line]
        assert "images cannot be decoded any more: the parent of the decode processes has ended" in line
        assert "Traceback" not in server.log()
        wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_processes_that_are_stopped_are_found_and_replaced(server: ServerProcess, samples: dict[Path, str]) -> None:
    paths, before = list(samples)[:4], server.decode_pids
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        captions = list(pool.map(lambda path: server.caption(path)["caption"], paths))
    assert captions == [samples[path] for path in paths]
    assert server.metrics()['snapcap_decode_processes_killed_total{reason="hung"}'] == 2
    assert 'why="killed: it had an image to decode and made no progress"' in server.log()
    server.wait_for(lambda: len(server.decode_pids) == 2)
    assert not set(before) & set(server.decode_pids)


def test_a_stopped_parent_is_found_when_a_process_is_to_be_replaced(
    compiled_options: tuple[str, ...], sample: tuple[Path, str]
) -> None:
    with ServerProcess(*compiled_options, *PROCESSES) as server:
        server.wait_ready()
        parent, (first, second) = server.decode_parent_pid, server.decode_pids
        os.kill(parent, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        assert server.caption(sample[0])["caption"] == sample[1], "there is another"
        assert server.process.wait(PATIENCE) == 4
        assert "has done nothing for 10 s" in server.log()
        wait_until(lambda: is_gone(parent) and is_gone(second))


def test_images_wait_where_cpus_are_short_and_requests_do_not(server: ServerProcess) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in server.decode_pids} == {mine + 5}


def test_the_kernel_would_take_a_decode_process_first(server: ServerProcess) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    others = [score(pid) for pid in (server.process.pid, server.engine_pid, server.decode_parent_pid)]
    assert all(score(pid) > max(others) for pid in server.decode_pids)


def test_the_end_of_a_server_is_the_end_of_its_processes(
    compiled_options: tuple[str, ...], sample: tuple[Path, str]
) -> None:
    with ServerProcess(*compiled_options, *PROCESSES) as server:
        server.wait_ready()
        server.caption(sample[0])
        pids = [server.engine_pid, server.decode_parent_pid, *server.decode_pids]
        for pid in pids[1:]:
            os.kill(pid, signal.SIGTERM)  # as a supervisor that signals a whole group
        server.caption(sample[0])
        server.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert all(is_gone(pid) for pid in pids)
        assert children(server.process.pid) == []
        assert " warning " not in server.log()
