"""Several models in one `snapcap serve`: which one answers, and how each wakes, leaves and fails."""

import base64
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.servers import raw_http
from support.servers.server_process import ServerProcess, wait_until

from snapcap.benchmarks.harness.processes import children, descendants, is_gone
from snapcap.service.captioning.captioner import WeightFiles
from snapcap.service.config.settings import HttpSettings, ResidencySettings, Settings
from snapcap.service.server.residency import known
from snapcap.warmup.errors import StartError
from snapcap.warmup.machine import capacity
from snapcap.warmup.options import ComputeOptions

PATIENCE = 60.0
JSON = {"Content-Type": "application/json"}
# Both are the demo model. `short` ends after two tokens, so a caption tells which model wrote it.
MODELS = '[demo]\nmodel = "demo"\n\n[short]\nmodel = "demo"\nmax_new_tokens = 2\n'
Serve = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def models_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("models") / "models.toml"
    file.write_text(MODELS)
    return file


def serving(built_cache: Path, models_file: Path, *options: str) -> ServerProcess:
    fixed = ("--cache-dir", str(built_cache), "--buckets", "1,4", "--decode-processes", "1", "--backend", "aot")
    return ServerProcess("--models", str(models_file), *fixed, *options)


@pytest.fixture(scope="module")
def server(built_cache: Path, models_file: Path) -> Iterator[ServerProcess]:
    """Both models stay."""
    with serving(built_cache, models_file) as process:
        yield process.wait_ready()


@pytest.fixture
def serve(built_cache: Path, models_file: Path) -> Iterator[Serve]:
    """Starts a server with more options, which is ready."""
    started: list[ServerProcess] = []

    def start(*options: str) -> ServerProcess:
        process = serving(built_cache, models_file, *options).__enter__()
        started.append(process)
        return process.wait_ready()

    yield start
    for process in started:
        process.__exit__()


@pytest.fixture
def sample(samples: dict[Path, str]) -> Path:
    return next(iter(samples))


def states(server: ServerProcess) -> dict[str, str]:
    found: dict[str, str] = server.startup()["models"]
    return found


def engines(server: ServerProcess) -> list[int]:
    """The engine processes that have a model: an engine process in reserve has at most two threads, and a parent of
    decode processes has one."""
    return [pid for pid in children(server.process.pid) if len(list(Path(f"/proc/{pid}/task").glob("*"))) > 2]


def spawned_engines(server: ServerProcess) -> list[int]:
    """The engine processes that were started after READY."""
    module, kind = b"snapcap.service.server.processes", b"engine"
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children(server.process.pid)}
    return [pid for pid, command in commands.items() if module in command and kind in command]


def had_self_test(server: ServerProcess, model: str) -> bool:
    """Returns whether the model's last start had a self-test."""
    phases = server.call(f"/startup?model={model}")[1]["phases"]
    return "self_test" in {each["name"] for each in phases}


def post(server: ServerProcess, path: str, message: Any) -> tuple[int, Any, dict[str, str]]:
    return server.call(path, json.dumps(message).encode(), JSON)


def test_each_api_chooses_by_name_and_the_first_model_without_one(
    server: ServerProcess, samples: dict[Path, str]
) -> None:
    path, whole = next(iter(samples.items()))
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    assert states(server) == {"demo": "ready", "short": "ready"}
    first, second = server.caption(path), server.caption(path, "?model=short")
    assert (first["model"], first["caption"], first["backend"]) == ("demo", whole, "aot")
    assert (second["model"], second["tokens"], second["finish_reason"]) == ("short", 2, "length")
    brief = second["caption"]
    assert whole.startswith(brief)
    assert whole != brief
    assert post(server, "/v1/caption", {"image": text, "model": "short"})[1]["caption"] == brief
    assert post(server, "/v1/caption?model=demo", {"image": text, "model": "short"})[1]["caption"] == brief
    events = server.call("/v1/caption?model=short", data, {"Accept": "text/event-stream"})[1]
    assert json.loads(events.strip().splitlines()[-1].removeprefix("data: "))["model"] == "short"
    form = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nshort\r\n'
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + data + b"\r\n--b--\r\n"
    )
    several = server.call("/v1/captions", form, {"Content-Type": "multipart/form-data; boundary=b"})[1]
    assert [each["caption"] for each in several["captions"]] == [brief]
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{text}"}}]
    for name, caption in (("short", brief), ("demo", whole), ("", whole)):
        chat = {"model": name, "messages": [{"role": "user", "content": parts}]}
        reply = post(server, "/v1/chat/completions", chat)[1]
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == (name or "demo", caption)
    for name, caption in (("short", brief), ("demo", whole)):
        assert server.call(f"/models/{name}", data)[1] == [{"generated_text": caption}]
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
        reply = post(server, f"/v2/models/{name}/infer", {"inputs": [tensor]})[1]
        assert (reply["model_name"], reply["outputs"][0]["data"]) == (name, [caption])
    assert server.call("/", data)[1] == [{"generated_text": whole}]


def test_a_model_that_does_not_exist_is_no_other_one(server: ServerProcess, sample: Path) -> None:
    data = sample.read_bytes()
    for path in ("/v1/caption?model=other", "/models/other"):
        status, body, _ = server.call(path, data)
        assert (status, "use 'demo' or 'short'" in json.dumps(body)) == (404, True)
    assert server.call("/v2/models/other")[0] == 404
    assert server.call("/startup?model=other")[0] == 404


def test_lists_have_each_model_with_its_state(server: ServerProcess) -> None:
    listed = server.call("/v1/models")[1]["data"]
    assert [(each["id"], each["state"]) for each in listed] == [("demo", "ready"), ("short", "ready")]
    assert server.call("/v1/models/short")[1]["id"] == "short"
    assert server.call("/v2")[1]["models"] == [
        {"name": "demo", "state": "ready"},
        {"name": "short", "state": "ready"},
    ]
    for name in ("demo", "short"):
        assert server.call(f"/v2/models/{name}/ready")[0] == 200
        report = server.call(f"/startup?model={name}")[1]
        assert (report["model"], report["state"], report["tier"]) == (name, "ready", "aot")
        assert "warm_encoder" in {phase["name"] for phase in report["phases"]}


def test_metrics_have_the_model_as_a_label(server: ServerProcess, sample: Path) -> None:
    def tokens(name: str) -> float:
        return server.metrics()[f'snapcap_generated_tokens_total{{model="{name}"}}']

    before = tokens("demo"), tokens("short")
    server.caption(sample, "?model=short")
    assert (tokens("demo"), tokens("short")) == (before[0], before[1] + 2)
    metrics = server.metrics()
    assert len(metrics) == len({name.partition(" ")[0] for name in metrics})
    for name in ("demo", "short"):
        assert metrics[f'snapcap_model_state{{model="{name}",state="ready"}}'] == 1
        assert metrics[f'snapcap_model_wakes_total{{model="{name}",result="ready"}}'] == 1
        assert metrics[f'snapcap_model_host_bytes{{model="{name}"}}'] > 0
        assert metrics[f'snapcap_startup_tier{{backend="aot",model="{name}"}}'] == 1
    assert metrics["snapcap_ready"] == 1
    families = [line.split()[2] for line in server.call("/metrics")[1].splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


def test_a_model_wakes_for_a_request_and_leaves_when_idle(serve: Serve, samples: dict[Path, str]) -> None:
    path, caption = next(iter(samples.items()))
    server = serve("--idle-unload", "0.5")
    assert states(server) == {"demo": "absent", "short": "absent"}
    assert engines(server) == []
    for turn in (1, 2):
        assert server.caption(path, "?model=short")["tokens"] == 2
        assert had_self_test(server, "short") == (turn == 1)
        woken = descendants(server.process.pid)
        assert states(server) == {"demo": "absent", "short": "ready"}
        server.wait_for(lambda: states(server)["short"] == "absent")
        assert engines(server) == []
        # Its processes are gone; an engine process in reserve, which has no model, may be among them.
        wait_until(lambda woken=woken: sum(not is_gone(pid) for pid in woken) <= 1)
        metrics = server.metrics()
        assert metrics['snapcap_model_wakes_total{model="short",result="ready"}'] == turn
        assert metrics['snapcap_model_leaves_total{model="short",why="idle"}'] == turn
        assert metrics['snapcap_model_wake_seconds_count{model="short"}'] == turn
        assert metrics['snapcap_model_host_bytes{model="short"}'] == 0
    assert server.caption(path)["caption"] == caption
    server.terminate()
    assert server.process.wait(PATIENCE) == 0


def test_a_model_that_woke_without_packages_tests_them_when_they_are_there(
    built_cache: Path, models_file: Path, sample: Path, tmp_path: Path
) -> None:
    cache, hidden = tmp_path / "cache", tmp_path / "manifests"
    shutil.copytree(built_cache, cache)
    manifests = cache / "store" / "manifests"
    manifests.rename(hidden)
    options = ("--cache-dir", str(cache), "--backend", "auto", "--build", "off", "--idle-unload", "0.5")
    with serving(built_cache, models_file, *options) as server:
        server.wait_ready()
        for backend, tested in (("eager", True), ("aot", True), ("aot", False)):
            assert server.caption(sample, "?model=short")["backend"] == backend
            assert had_self_test(server, "short") == tested
            server.wait_for(lambda: states(server)["short"] == "absent")
            if hidden.exists():
                hidden.rename(manifests)


def test_an_engine_process_in_reserve_serves_the_next_model_that_wakes(serve: Serve, sample: Path) -> None:
    server = serve("--preload", "demo")
    server.wait_for(lambda: spawned_engines(server))
    (reserve,) = spawned_engines(server)
    server.caption(sample, "?model=short")
    assert reserve in engines(server)
    assert spawned_engines(server) == [reserve]


def test_requests_of_all_kinds_wait_for_one_wake(serve: Serve, sample: Path) -> None:
    server = serve("--idle-unload", "60")
    text = base64.b64encode(sample.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{text}"}}]
    chat = {"model": "short", "messages": [{"role": "user", "content": parts}]}
    for path, other in (
        ("/v1/chat/completions", {**chat, "model": "other"}),
        ("/api/generate", {"model": "other", "images": [text]}),
    ):
        assert post(server, path, other)[0] == 404
    with ThreadPoolExecutor(8) as pool:
        captions = [pool.submit(server.caption, sample, "?model=short") for _ in range(4)]
        chats = [pool.submit(post, server, "/v1/chat/completions", chat) for _ in range(4)]
        assert {each.result()["tokens"] for each in captions} == {2}
        assert {each.result()[1]["usage"]["completion_tokens"] for each in chats} == {2}
    assert server.metrics()['snapcap_model_wakes_total{model="short",result="ready"}'] == 1
    assert states(server)["demo"] == "absent", "the unknown name has not woken the first model"


def test_a_model_with_a_request_does_not_leave(serve: Serve, sample: Path) -> None:
    server = serve("--idle-unload", "0.3")
    server.caption(sample)
    (engine,) = engines(server)
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.caption, sample)
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 1)
        begun = server.metrics()['snapcap_model_idle_seconds{model="demo"}']
        threading.Event().wait(1.0)  # three times the idle time
        assert (begun, states(server)["demo"]) == (0, "ready")
        os.kill(engine, signal.SIGCONT)
        assert waiting.result()["model"] == "demo"
    server.wait_for(lambda: states(server)["demo"] == "absent")


def test_an_engine_process_that_dies_fails_its_requests_and_the_next_one_wakes_it(
    serve: Serve, sample: Path
) -> None:
    server = serve("--preload", "all")
    server.caption(sample)
    first = children(server.process.pid)[0]
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(server.call, "/v1/caption", sample.read_bytes())
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 1)
        assert server.caption(sample, "?model=short")["tokens"] == 2  # nobody else is touched
        os.kill(first, signal.SIGKILL)
        status, body, _ = lost.result()
    assert (status, body["code"]) == (503, "not_ready")
    assert server.call("/readyz")[0] == 200
    assert server.caption(sample)["model"] == "demo"
    assert had_self_test(server, "demo")
    metrics = server.metrics()
    assert metrics['snapcap_model_leaves_total{model="demo",why="failed"}'] == 1
    assert metrics['snapcap_model_wakes_total{model="demo",result="ready"}'] == 2
    assert metrics['snapcap_model_wakes_total{model="short",result="ready"}'] == 1


def test_a_wake_that_fails_is_told_with_its_reason_and_touches_nobody(
    built_cache: Path, tmp_path: Path, sample: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "never-heard-of"}')
    options = ("--cache-dir", str(built_cache), "--buckets", "1,4", "--decode-processes", "1")
    models = ("--model", "demo=demo", "--model", f"broken={broken}")
    with ServerProcess(*models, *options, "--preload", "demo") as server:
        server.wait_ready()
        status, body, headers = server.call("/v1/caption?model=broken", sample.read_bytes())
        assert (status, body["code"]) == (503, "not_ready")
        assert "'broken' cannot wake: " in body["detail"]
        assert "never-heard-of" in body["detail"]
        assert int(headers["retry-after"]) >= 1
        assert server.caption(sample)["model"] == "demo"
        server.wait_for(lambda: states(server) == {"demo": "ready", "broken": "absent"})

        def is_refused() -> bool:
            server.call("/v1/caption?model=broken", sample.read_bytes())  # after a pause, it wakes and fails again
            return bool(server.call("/v2/models/broken/ready")[0] == 503)

        server.wait_for(is_refused)
        assert server.call("/v2/models/demo/ready")[0] == 200
        assert len(engines(server)) == 1
        assert "never-heard-of" in server.call("/startup?model=broken")[1]["error"]
        assert server.metrics()['snapcap_model_wakes_total{model="broken",result="failed"}'] >= 1
    with ServerProcess(*models, *options) as server:  # both must be ready before READY
        assert server.process.wait(PATIENCE) == 3
        assert "the model 'broken' cannot start: " in server.log()


def test_a_wake_whose_process_dies_is_tried_again_after_a_pause(serve: Serve, sample: Path) -> None:
    server = serve("--idle-unload", "60")
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(server.call, "/v1/caption", sample.read_bytes())
        server.wait_for(lambda: states(server)["demo"] != "absent")
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        status, body, headers = lost.result()
    if status == 200:
        pytest.skip("the model was awake before its process was killed")
    assert (status, "by signal SIGKILL" in body["detail"], headers["retry-after"]) == (503, True, "1")
    server.wait_for(lambda: server.call("/v1/caption", sample.read_bytes())[0] == 200)


def test_a_client_that_leaves_does_not_end_the_wake(serve: Serve, sample: Path) -> None:
    server = serve("--idle-unload", "60")
    with raw_http.connected(server.port) as client:
        client.sendall(raw_http.post("/v1/caption", sample.read_bytes()))
        server.wait_for(lambda: states(server)["demo"] != "absent")
    server.wait_for(lambda: states(server)["demo"] == "ready")
    server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 0)


def test_a_drain_during_a_wake_answers_the_request_and_leaves_no_process(serve: Serve, sample: Path) -> None:
    server = serve("--idle-unload", "60")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.caption, sample)
        server.wait_for(lambda: states(server)["demo"] != "absent")
        started = descendants(server.process.pid)
        server.terminate()
        assert waiting.result()["model"] == "demo"
    assert server.process.wait(PATIENCE) == 0
    for pid in started:
        wait_until(lambda pid=pid: is_gone(pid))


def test_no_process_outlives_a_server_that_is_killed(serve: Serve, sample: Path) -> None:
    server = serve("--idle-unload", "60", "--preload", "demo")
    server.caption(sample, "?model=short")
    started = descendants(server.process.pid)
    assert len(engines(server)) == 2
    server.process.kill()
    server.process.wait()
    for pid in started:
        wait_until(lambda pid=pid: is_gone(pid))


@pytest.fixture(scope="module")
def one_model(built_cache: Path, models_file: Path) -> int:
    """Bytes of memory that the processes of a model take after a request has woken it. A server's first model takes
    an eighth more: its processes are forked from the server's."""
    with serving(built_cache, models_file) as process:
        return int(process.wait_ready().metrics()['snapcap_model_host_bytes{model="short"}'])


def test_the_model_that_was_used_least_recently_leaves_for_another(
    serve: Serve, sample: Path, one_model: int
) -> None:
    server = serve("--host-memory", str(int(one_model * 1.5)))
    assert known(Settings()).least.host < one_model < known(Settings()).most.host
    for name in ("demo", "short", "demo"):
        assert server.caption(sample, f"?model={name}")["model"] == name
        server.wait_for(
            lambda name=name: [each for each, state in states(server).items() if state == "ready"] == [name]
        )
    metrics = server.metrics()
    assert metrics['snapcap_model_leaves_total{model="demo",why="memory"}'] == 1
    assert metrics['snapcap_model_leaves_total{model="short",why="memory"}'] == 1
    log = server.log()
    assert log.index("model leaving model=demo") < log.index("model waking model=short"), "it made room before"


def test_two_models_that_do_not_fit_together_take_turns(serve: Serve, sample: Path, one_model: int) -> None:
    server = serve("--host-memory", str(int(one_model * 1.5)))
    for name in ("demo", "short"):  # what each needs is known from now on
        server.caption(sample, f"?model={name}")
    ended = threading.Event()

    def ask_again_and_again(name: str) -> int:
        count = 0
        while not ended.is_set():
            assert server.caption(sample, f"?model={name}")["model"] == name
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask_again_and_again, name) for name in ("demo", "demo", "short", "short")]

        def turns() -> float:
            metrics = server.metrics()
            return min(
                metrics[f'snapcap_model_wakes_total{{model="{name}",result="ready"}}'] for name in states(server)
            )

        try:
            server.wait_for(lambda: turns() >= 3)
        finally:
            ended.set()
        counts = [client.result() for client in clients]
    assert min(counts) > 1, "each makes progress in its turns"


def test_a_model_that_never_fits_is_refused_at_the_start(models_file: Path, built_cache: Path) -> None:
    with serving(built_cache, models_file, "--host-memory", "1MiB") as server:
        assert server.process.wait(PATIENCE) == 3
        assert "the model 'demo' needs more memory than there is: " in server.log()
        assert "MiB of 1 MiB (--host-memory)" in server.log()


def test_device_memory_is_known_before_the_first_wake() -> None:
    few, many = (known(_on_a_gpu(4 << 30, buckets)) for buckets in ((1,), (1, 4, 16)))
    assert few.files == many.files != WeightFiles()
    assert few.files.size / 2 < few.least.device < few.most.device < many.most.device  # bfloat16 on a GPU
    assert known(_on_a_gpu(None, (1,))).most.device == 0  # without a limit nothing is computed
    with pytest.raises(StartError, match=r"the model 'demo' needs more .* of 1 MiB \(--device-memory\)"):
        known(_on_a_gpu(1 << 20, (1,)))


@pytest.mark.parametrize(
    ("stored", "dtype", "converted"),
    [
        ("bfloat16", "float32", True),
        ("bfloat16", "int8", True),
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "auto", False),
        ("float16", "auto", True),
        ("float32", "float32", False),
    ],
)
def test_weights_of_16_bits_may_take_twice_their_size_on_the_host(
    stored: str, dtype: str, converted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "instruction_set", lambda: ["avx512_bf16"])
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    model, demo = replace(Settings().model, source=str(tmp_path)), known(Settings())
    found = known(replace(Settings(), model=model, compute=ComputeOptions("cpu", dtype)))
    assert found.files.size == 1 << 20
    assert found.most.host - (demo.most.host - demo.files.size) == (2 << 20 if converted else 1 << 20)


def _on_a_gpu(device_memory: int | None, buckets: tuple[int, ...]) -> Settings:
    return replace(
        Settings(),
        compute=ComputeOptions(device="cuda:0", buckets=buckets),
        residency=ResidencySettings(device_memory=device_memory),
        http=HttpSettings(model_name="demo"),
    )


def test_keep_alive_says_when_a_model_leaves(serve: Serve, sample: Path) -> None:
    server = serve("--idle-unload", "1000")
    images = [base64.b64encode(sample.read_bytes()).decode()]

    def generate(**more: Any) -> Any:
        status, body, _ = post(server, "/api/generate", {"model": "short", "stream": False, **more})
        assert status == 200, body
        return body

    def left() -> float:
        (loaded,) = server.call("/api/ps")[1]["models"]
        return (datetime.fromisoformat(loaded["expires_at"]) - datetime.now(UTC)).total_seconds()

    def unloaded() -> bool:
        return states(server)["short"] == "absent"

    first, second = server.call("/api/tags")[1]["models"]
    assert 0 < first["size"] == second["size"]
    assert first["digest"] == second["digest"] != "0" * 64
    assert generate(keep_alive=0)["done_reason"] == "unload"
    assert states(server)["short"] == "absent", "it was not woken to be unloaded"
    assert generate()["done_reason"] == "load"
    assert 500 < left() < 1000
    awake = generate(images=images, keep_alive="5m")
    assert (awake["eval_count"], awake["load_duration"]) == (2, 0)
    assert server.caption(sample, "?model=short")["tokens"] == 2  # requests without it change nothing
    assert 0 < left() < 300
    generate(keep_alive=-1)
    assert left() > 1e9
    assert generate(images=images, keep_alive=0)["eval_count"] == 2
    server.wait_for(unloaded)
    assert server.call("/api/ps")[1]["models"] == []
    chat = {"model": "short", "messages": [{"role": "user", "images": images}], "keep_alive": 0}
    end = json.loads(post(server, "/api/chat", chat)[1].splitlines()[-1])  # of a stream that wakes the model
    assert end["eval_count"] == 2
    assert 0 < end["load_duration"] < end["total_duration"]
    server.wait_for(unloaded)
    generate()
    assert 500 < left() < 1000, "its last keep_alive went with it"
    generate(keep_alive="1ms")
    server.wait_for(unloaded)
    metrics = server.metrics()
    assert metrics['snapcap_model_leaves_total{model="short",why="idle"}'] == 3
    assert metrics['snapcap_model_wakes_total{model="short",result="ready"}'] == 3


def test_three_models_in_the_room_of_two_lose_no_request(
    built_cache: Path, demo_folder: Path, samples: dict[Path, str], tmp_path: Path, one_model: int
) -> None:
    """Clients ask for all models while an engine process is killed and a wake fails: each request gets its model's
    caption, or is told that the model is not ready."""
    path, whole = next(iter(samples.items()))
    folder, models_file = tmp_path / "third", tmp_path / "models.toml"
    shutil.copytree(demo_folder, folder)
    models_file.write_text(f'{MODELS}\n[third]\nmodel = "{folder}"\nmax_new_tokens = 3\n')
    data, ended = path.read_bytes(), threading.Event()
    lengths = {"demo": len(whole.split()), "short": 2, "third": 3}
    answered, unexpected = dict.fromkeys(lengths, 0), list[Any]()
    with serving(built_cache, models_file, "--host-memory", str(int(one_model * 2.5))) as server:
        server.wait_ready()

        def ask_again_and_again(name: str) -> None:
            while not ended.wait(0.05):
                status, body, _ = server.call(f"/v1/caption?model={name}", data)
                right = status == 200 and body["model"] == name
                if right and body["caption"] == " ".join(whole.split()[: lengths[name]]):
                    answered[name] += 1
                elif (status, body and body.get("code")) != (503, "not_ready"):
                    unexpected.append((name, status, body))

        def count(metric: str, **labels: str) -> float:
            wanted = [f'{label}="{value}"' for label, value in labels.items()]
            return sum(
                value
                for name, value in server.metrics().items()
                if name.startswith(metric) and all(each in name for each in wanted)
            )

        def killed() -> bool:
            if count("snapcap_model_leaves_total", why="failed"):
                return True
            for pid in engines(server)[:1]:
                os.kill(pid, signal.SIGKILL)
            return False

        with ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(ask_again_and_again, name) for name in [*lengths] * 2]
            try:
                server.wait_for(lambda: min(count("snapcap_model_wakes_total", model=each) for each in lengths) > 1)
                server.wait_for(killed)
                (folder / "config.json").rename(folder / "away")
                server.wait_for(lambda: count("snapcap_model_wakes_total", model="third", result="failed") > 0)
                (folder / "away").rename(folder / "config.json")
                before = dict(answered)
                server.wait_for(lambda: all(answered[name] > before[name] for name in lengths))
            finally:
                ended.set()
            for client in clients:
                client.result()
        assert unexpected == []
        assert count("snapcap_model_leaves_total", why="memory") > 1
