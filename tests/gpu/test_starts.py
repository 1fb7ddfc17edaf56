"""Real starts on a GPU: the demo model built, then served from packages; and the jit backend, cold and restored."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fakes.start_modules import assert_starts_without_a_compiler
from support.servers.device_starts import BUCKETS, JIT, Background, serve
from support.servers.server_process import ServerProcess, python

ROOT = Path(__file__).parent.parent.parent
EAGER = ("--backend", "eager", *BUCKETS)
COMPILED = 'snapcap_compile_events_total{{when="{}"}}'
CACHE = 'snapcap_compile_cache_total{{result="{}"}}'
pytestmark = pytest.mark.timeout(600)


def test_a_server_with_artifacts_is_compiled_warm_and_right(
    served: None, built: Path, device: torch.device, samples: dict[Path, str]
) -> None:
    options = ("--backend", "aot", "--strict", *BUCKETS)
    startup, metrics, captions = serve(built, device.type, options, samples)
    assert (startup["tier"], startup["artifacts"]["result"]) == ("aot", "hit")
    state = "captured" if device.type == "cuda" else "warm"
    assert {(bucket["backend"], bucket["state"]) for bucket in startup["buckets"]} == {("aot", state)}
    assert (startup["torch_modules"], metrics["snapcap_torch_modules"]) == (0, 0)
    assert captions == samples
    assert [metrics[COMPILED.format(when)] for when in ("startup", "serving")] == [0, 0]


def test_an_eager_start_has_the_driver_compile_nothing(
    served: None, device: torch.device, samples: dict[Path, str], tmp_path: Path
) -> None:
    """A new container has no cache of the driver's, which compiles what it is given as PTX."""
    with ServerProcess("--device", device.type, *EAGER, CUDA_CACHE_PATH=str(tmp_path / "driver")) as server:
        server.wait_for(lambda: server.call("/readyz")[0] == 200, seconds=120)
        assert {path: server.caption(path)["caption"] for path in samples} == samples
    assert [path for path in (tmp_path / "driver").rglob("*") if path.is_file()] == [], "it may make the folder"


def test_a_compiled_start_without_prepared_weights_imports_torch_and_captions_the_same(
    served: None, built: Path, device: torch.device, samples: dict[Path, str]
) -> None:
    options = ("--cache-dir", str(built), "--device", device.type, "--backend", "aot", "--strict", *BUCKETS)
    with ServerProcess(*options, SNAPCAP_PREPARED_WEIGHTS="false") as server:
        server.wait_for(lambda: server.call("/readyz")[0] == 200, seconds=120)
        assert {path: server.caption(path)["caption"] for path in samples} == samples
        startup = server.startup()
    assert "import_torch" in [phase["name"] for phase in startup["phases"]]
    assert startup["torch_modules"] > 100


def choices(cache: Path, device: str, *more: str, **environment: str) -> dict[str, Any]:
    """What a start in a process of its own, without torch unless it is told so, makes of every kind of request."""
    arguments = ("-m", "support.programs.choices", str(cache), device, "1,4", *more)
    run = python(*arguments, PYTHONPATH=f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}", **environment)
    assert run.returncode == 0, run.stderr
    printed: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return printed


def test_without_torch_every_kind_of_request_gets_the_tokens_that_it_gets_with_it(
    built: Path, device: torch.device
) -> None:
    ours = choices(built, device.type)
    state = "captured" if device.type == "cuda" else "warm"
    assert (ours["torch"], ours["mapped"], ours["states"]) == (0, [], [state])
    theirs = choices(built, device.type, SNAPCAP_TESTS_WITH_TORCH="1")
    assert theirs["torch"] > 0
    assert ours["tokens"] == theirs["tokens"]


def test_a_model_that_wakes_again_records_launches_that_never_ran_and_gives_the_same_tokens(
    built: Path, device: torch.device
) -> None:
    first = choices(built, device.type)
    again = choices(built, device.type, SNAPCAP_TESTS_TESTED=first["tested"])
    assert (first["rehearses"], again["rehearses"]) == (True, False)
    assert again["states"] == ["captured" if device.type == "cuda" else "warm"]
    assert again["tokens"] == first["tokens"]


def test_the_memory_of_a_graph_is_its_own_while_the_device_is_filled_and_freed(
    built: Path, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("A CPU HAS NO GRAPHS")
    quiet, crowded = choices(built, device.type), choices(built, device.type, "crowded")
    assert crowded["refused"] > 0, "the device was full"
    assert crowded["tokens"] == quiet["tokens"]


def test_a_compiled_start_imports_no_compiler_and_starts_no_process(built: Path, device: torch.device) -> None:
    assert_starts_without_a_compiler(built, device.type)


def test_the_second_jit_start_misses_nothing_and_captions_the_same(
    served: None, background: Background, device: torch.device, samples: dict[Path, str]
) -> None:
    cold, cold_metrics, captions = background.cold.result()
    assert (cold["tier"], cold["artifacts"]["result"]) == ("jit", "miss")
    assert cold_metrics[COMPILED.format("startup")] >= 6, "six regions at one bucket, and what only searches need"
    assert captions == samples
    restored, metrics, again = serve(background.jit, device.type, JIT, samples)
    assert (restored["tier"], restored["artifacts"]["result"]) == ("jit", "hit")
    assert metrics[CACHE.format("miss")] == metrics[CACHE.format("bypass")] == 0
    assert metrics[CACHE.format("hit")] > 0
    assert metrics[COMPILED.format("serving")] == 0
    assert again == captions


def test_images_arrive_as_they_are_whatever_their_number_and_size(device: torch.device) -> None:
    """Several threads send them where there are many."""
    if device.type != "cuda":
        pytest.skip("IMAGES ARE COPIED FROM PINNED MEMORY ON A GPU ALONE")
    run = python(
        "-m", "support.programs.staging", PYTHONPATH=f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["wrong"] == []
