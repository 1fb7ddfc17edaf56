"""The plan of a start, and what warming does with it: every bucket runs once, damage is noticed."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapcap.models.config import ModelConfig
from snapcap.models.layers.weights import RegionFunction
from snapcap.models.regions.table import Region
from snapcap.warmup.artifacts.fetch import Artifacts, Fetched, Result
from snapcap.warmup.errors import StartError
from snapcap.warmup.machine import capacity
from snapcap.warmup.options import BackendChoice, ComputeOptions, ModelOptions, StartOptions, StoreOptions
from snapcap.warmup.plan.plan import DEFAULT_BUCKETS, Bucket, BucketTable, Plan, make_plan
from snapcap.warmup.progress.status import COMPONENTS, StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.model import EagerBackend, PackageError
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.torch_model import open_device
from snapcap.warmup.start.start import StartedModel, _identity, before_ready, load
from snapcap.warmup.start.warmer import Warmer, self_test
from snapcap.warmup.start.with_torch import _report_missing

SIZES = (1, 2, 5)


@pytest.fixture(scope="module")
def on_device() -> Iterator[Callable[..., Any]]:
    """``on_device(function, *arguments)`` on one thread: a start turns gradients off for the thread it runs on."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def options_of(folder: Path, model: dict[str, Any] | None = None, **compute: Any) -> StartOptions:
    given = {"device": "cpu", "backend": "eager", "threads": 1, "buckets": SIZES} | compute
    return StartOptions(ModelOptions(**{"cache_dir": folder, **(model or {})}), ComputeOptions(**given))


@pytest.fixture(scope="module")
def config(demo_folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(demo_folder)


# --- the plan ---


def test_the_cache_holds_the_models_length_and_room_for_a_prompt(config: ModelConfig, tmp_path: Path) -> None:
    def length(max_length: int, positions: int, **changes: Any) -> int:
        changed = replace(
            config,
            generation=replace(config.generation, max_length=max_length),
            decoder=replace(config.decoder, n_positions=positions),
        )
        return make_plan(changed, options_of(tmp_path, changes)).cache_length

    assert length(20, 1024) == 64
    assert length(100, 1024) == 100
    assert length(20, 48) == 48  # never beyond the positions that the model has
    assert length(20, 1024, max_new_tokens=200) == 201  # and the start token
    assert length(20, 1024, max_new_tokens=2000) == 1024
    assert length(100, 1024, cache_length=30) == 30
    assert length(20, 1024, cache_length=1024) == 1024


@pytest.mark.parametrize("length", [1, 4000])
def test_a_cache_that_the_model_cannot_have_stops_the_start(
    config: ModelConfig, tmp_path: Path, length: int
) -> None:
    says = rf"cache_length {length}: this model has positions for 2 to {config.decoder.n_positions} tokens"
    with pytest.raises(StartError, match=says):
        make_plan(config, options_of(tmp_path, {"cache_length": length}))


def test_bad_buckets_stop_the_start(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^buckets: .*distinct positive numbers, not \[4, 4\]"):
        make_plan(config, options_of(tmp_path, buckets=(4, 4)))


def test_what_the_options_leave_open_is_decided_by_the_device(config: ModelConfig, tmp_path: Path) -> None:
    def plan(**compute: Any) -> Plan:
        return make_plan(config, options_of(tmp_path, buckets=(), threads=0, **compute))

    cpu, cuda = plan(), plan(device="cuda:1")
    assert (cpu.dtype, cpu.buckets, cpu.device_type) == ("float32", DEFAULT_BUCKETS["cpu"], "cpu")
    assert (cuda.dtype, cuda.buckets, cuda.device_type) == ("bfloat16", DEFAULT_BUCKETS["cuda"], "cuda")
    assert plan(dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("stored", "instructions", "dtype"),
    [
        ("bfloat16", ["avx512_bf16", "avx512f"], "bfloat16"),
        ("bfloat16", ["amx_bf16"], "bfloat16"),
        ("bfloat16", ["avx512f"], "float32"),
        ("float16", ["avx512_bf16"], "float32"),
        ("float32", ["avx512_bf16"], "float32"),
        ("", ["avx512_bf16"], "float32"),
    ],
)
def test_a_cpu_runs_in_bfloat16_what_is_stored_in_it_where_it_multiplies_it(
    stored: str,
    instructions: list[str],
    dtype: str,
    config: ModelConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "instruction_set", lambda: instructions)
    config = replace(config, stored_dtype=stored)
    assert make_plan(config, options_of(tmp_path)).dtype == dtype
    for said in ("float32", "bfloat16", "float16"):
        assert make_plan(config, options_of(tmp_path, dtype=said)).dtype == said
    assert make_plan(config, options_of(tmp_path, device="cuda:0")).dtype == "bfloat16"


@pytest.mark.parametrize(("width", "layers", "threads"), [(192, 6, 7), (768, 1, 7), (768, 12, 8)])
def test_a_small_encoder_leaves_a_cpu_to_http(
    width: int, layers: int, threads: int, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(capacity, "cpu_limit", lambda: None)
    shapes = {"image_size": (224, 224), "patch_size": (16, 16), "intermediate_size": 4 * width}
    config = replace(config, vision=replace(config.vision, hidden_size=width, num_layers=layers, **shapes))
    assert make_plan(config, options_of(tmp_path, threads=0)).threads == threads
    assert make_plan(config, options_of(tmp_path, threads=3)).threads == 3


def test_a_device_that_is_not_there_is_named(config: ModelConfig, tmp_path: Path, on_device: Any) -> None:
    plan = make_plan(config, options_of(tmp_path, device="cuda:99"))
    with pytest.raises(StartError, match=r"^device cuda:99: (torch has no usable CUDA|this machine has \d+ CUDA)"):
        on_device(open_device, plan)


# --- warming ---


@pytest.fixture(scope="module")
def started(
    on_device: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[StartedModel, Timeline, StartupStatus]:
    timeline, status = Timeline.since_exec(), StartupStatus()
    options = options_of(tmp_path_factory.mktemp("cache"))
    return on_device(load, options, timeline, status), timeline, status


def test_a_start_warms_every_bucket_and_tells_its_phases(
    started: tuple[StartedModel, Timeline, StartupStatus],
) -> None:
    loaded, timeline, status = started
    assert [(b.component, b.size) for b in status.buckets()] == [(c, size) for c in COMPONENTS for size in SIZES]
    assert {(b.state, b.backend) for b in status.buckets()} == {("eager", "eager")}
    assert all(b.seconds is not None and b.seconds > 0 for b in status.buckets())
    assert status.backend == "eager"
    names = [phase.name for phase in timeline.phases()]
    assert names[0] == "interpreter"
    serial = ["device_init", "load_weights", "load_artifacts", "warm_encoder", "warm_decoder", "self_test"]
    assert names[-6:] == serial
    assert {"import_torch", "fetch_weights"} == set(names[1:-6])
    assert all(phase.end is not None for phase in timeline.phases())
    # A CPU has nothing worth leaving for later.
    assert (loaded.cold, loaded.warm_table.sizes, loaded.compiled) == ((), SIZES, False)


@pytest.mark.parametrize(
    ("backend", "asked", "device", "sizes"),
    [
        ("aot", "auto", "cuda", (1, 2, 4)),
        ("aot", "aot", "cpu", (1, 2, 4)),
        ("eager", "auto", "cuda", (1,)),  # no artifacts: serve at once
        ("eager", "aot", "cuda", (1,)),
        ("eager", "auto", "cpu", (1, 2, 4)),
        ("eager", "eager", "cuda", (1, 2, 4)),
        ("jit", "jit", "cuda", (1, 2, 3, 4)),  # nothing is compiled after READY
    ],
)
def test_what_ready_waits_for(
    backend: str, asked: BackendChoice, device: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    plan = Plan(device, "float32", (1, 2, 4), 8, 1, step_buckets=(3,))
    assert before_ready(backend, plan, options_of(tmp_path, backend=asked)) == tuple(map(Bucket, sizes))


class Recording:
    """Eager, noting which region ran at how many rows; buckets of ``broken`` have no package, those of ``failing``
    one that does not run."""

    name = "recording"

    def __init__(self, broken: tuple[int, ...] = (), failing: tuple[int, ...] = ()) -> None:
        self.broken = broken
        self.failing = failing
        self.ran: list[tuple[str, int, int]] = []

    def callable(self, region: Region, bucket: Bucket) -> RegionFunction:
        if bucket.size in self.broken:
            raise PackageError(f"the artifact set has no {region.name}")

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            if bucket.size in self.failing:
                raise RuntimeError(f"no kernel for {region.name}")
            self.ran.append((region.name, bucket.size, len(inputs[0])))
            return region.function(*inputs)

        return run


@pytest.fixture
def make_warmer(started: tuple[StartedModel, Timeline, StartupStatus]) -> Callable[..., Warmer]:
    """A warmer with buffers, status and timeline of its own over the demo model."""

    def make(strict: bool = False) -> Warmer:
        status = StartupStatus()
        status.expect(SIZES, "cpu", "float32")
        runner: Runner = started[0].runner.twin()
        return Warmer(runner, BucketTable.of(SIZES), status, Timeline.since_exec(), strict, EagerBackend())

    return make


def test_every_region_of_every_bucket_runs_through_what_will_serve(make_warmer: Any, on_device: Any) -> None:
    warmer, backend = make_warmer(), Recording()
    warmer.assign(backend, warmer.table.buckets)
    assert {b.state for b in warmer.status.buckets()} == {"pending"}
    assert backend.ran == []
    on_device(warmer.warm, warmer.table.buckets, backend)
    # What chooses other tokens runs first when somebody asks for it.
    layers = {region.name: region.layers for region in warmer.runner.regions if not region.on_demand}
    for size in SIZES:
        for name, count in layers.items():
            assert backend.ran.count((name, size, size)) == count
    assert len(backend.ran) == len(SIZES) * sum(layers.values())
    assert {(b.state, b.backend) for b in warmer.status.buckets()} == {("warm", "recording")}


def test_the_warm_up_puts_only_buckets_without_a_backend_on_one(make_warmer: Any, on_device: Any) -> None:
    """jit would compile a bucket that is put on it again once more."""
    warmer, first, second = make_warmer(), Recording(), Recording()
    warmer.assign(first, (Bucket(1),))
    on_device(warmer.warm, (Bucket(1), Bucket(2)), second)
    assert ({size for _, size, _ in first.ran}, {size for _, size, _ in second.ran}) == ({1}, {2})
    assert all(warmer.runner.is_bound(component, Bucket(5)) for component in COMPONENTS)


def test_a_bucket_that_cannot_be_opened_stays_eager_and_says_so(make_warmer: Any, on_device: Any) -> None:
    warmer, backend = make_warmer(), Recording(broken=(2,))
    warmer.assign(backend, warmer.table.buckets)
    on_device(warmer.warm, warmer.table.buckets, backend)
    found = {(b.size, b.state, b.backend) for b in warmer.status.buckets()}
    assert found == {(1, "warm", "recording"), (2, "failed", "eager"), (5, "warm", "recording")}
    assert all(b.seconds is not None for b in warmer.status.buckets())
    assert {size for _, size, _ in backend.ran} == {1, 5}


def test_a_strict_start_ends_where_a_bucket_cannot_be_opened(make_warmer: Any) -> None:
    with pytest.raises(StartError, match=r"the recording backend cannot serve: the artifact set has no \w+_before"):
        make_warmer(strict=True).assign(Recording(broken=(5,)), (Bucket(5),))


def test_a_bucket_that_opens_and_cannot_run_stays_eager_and_says_so(make_warmer: Any, on_device: Any) -> None:
    warmer, backend = make_warmer(), Recording(failing=(2,))
    warmer.assign(backend, warmer.table.buckets)
    on_device(warmer.warm, warmer.table.buckets, backend)
    found = {(b.size, b.state, b.backend) for b in warmer.status.buckets()}
    assert found == {(1, "warm", "recording"), (2, "failed", "eager"), (5, "warm", "recording")}
    on_device(warmer.runner.decode_step, Bucket(2))


def test_a_strict_start_ends_where_a_bucket_cannot_run(make_warmer: Any, on_device: Any) -> None:
    warmer, backend = make_warmer(strict=True), Recording(failing=(2,))
    warmer.assign(backend, warmer.table.buckets)
    with pytest.raises(StartError, match="the recording backend cannot serve: no kernel for encoder_before"):
        on_device(warmer.warm, warmer.table.buckets, backend)


@pytest.mark.parametrize("backend", [Recording(failing=(5,)), Recording(broken=(5,))], ids=["fails", "broken"])
def test_a_bucket_aside_that_cannot_run_is_an_error(backend: Recording, make_warmer: Any, on_device: Any) -> None:
    with pytest.raises((RuntimeError, PackageError), match=r"no kernel for|the artifact set has no"):
        on_device(make_warmer().warm_aside, Bucket(5), backend)


def test_a_bucket_without_encodes_has_a_decoder_alone(make_warmer: Any, on_device: Any) -> None:
    warmer, backend = make_warmer(), Recording()
    steps = replace(warmer, table=BucketTable.of((1, 2)))
    steps.prepare(Bucket(5), backend)  # nothing to open
    assert backend.ran == []
    on_device(steps.warm_aside, Bucket(5), backend)
    assert {name.partition("_")[0] for name, size, rows in backend.ran if size == rows == 5} == {"decoder"}
    assert [warmer.runner.is_bound(component, Bucket(5)) for component in COMPONENTS] == [False, True]
    found = {b.component: (b.state, b.backend) for b in warmer.status.buckets() if b.size == 5}
    assert found == {"encoder": ("pending", ""), "decoder": ("warm", "recording")}


# --- the self-test ---


def test_the_self_test_captions_a_picture(
    started: tuple[StartedModel, Timeline, StartupStatus], on_device: Any
) -> None:
    loaded = started[0]
    for bucket in loaded.plan.table.buckets:
        tokens, _ = on_device(self_test, loaded.runner, bucket)
        assert loaded.checkpoint.tokenizer.decode(tokens).split()


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("encoder.encoder.layer.1.output.dense.weight", float("nan")),
        ("decoder.transformer.h.0.mlp.c_fc.bias", float("inf")),
        ("decoder.transformer.ln_f.weight", float("nan")),
    ],
)
def test_the_self_test_notices_damaged_weights(
    demo_folder: Path, tmp_path: Path, on_device: Any, tensor: str, value: float
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(demo_folder, folder, ignore=shutil.ignore_patterns("*.py", "samples", "__pycache__"))
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors")
    options = options_of(tmp_path, {"source": str(folder)})
    with pytest.raises(StartError, match="logits are not finite: the weights or the device are damaged"):
        on_device(load, options, Timeline.since_exec(), StartupStatus())


@pytest.mark.parametrize(
    ("result", "advice"),
    [
        ("miss", "run `snapcap build` with the same options"),
        ("stale", "run `snapcap build` with the same options"),
        ("corrupt", "which publishes them again"),
        ("untrusted", "name the key that signed them with --trusted-key"),
    ],
)
def test_a_start_without_artifacts_says_what_to_do(
    result: Result, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts = Artifacts("0" * 64, {}, Fetched(result, "because"))
    options = options_of(tmp_path, backend="aot", strict=True)
    with pytest.raises(StartError, match=f"no artifacts: {result}: because; .*{re.escape(advice)}"):
        _report_missing(artifacts, options)
    off = replace(options, compute=replace(options.compute, strict=False), store=StoreOptions(build="off"))
    _report_missing(artifacts, off)
    assert advice in vars(caplog.records[-1])["fields"]["remedy"]
    # A server that builds the artifacts itself needs no advice.
    _report_missing(artifacts, replace(off, store=StoreOptions(build="auto")))
    assert "remedy" not in vars(caplog.records[-1])["fields"]


def test_other_weights_or_packages_of_the_same_key_are_tested_anew() -> None:
    def identity(key: str = "k", blob: str = "b", weights: str = "w", chunks: tuple[str, ...] = ("1", "2")) -> str:
        manifest = SimpleNamespace(entries={"decoder/1": SimpleNamespace(digest=blob)})
        artifacts: Any = SimpleNamespace(key=key, fetched=SimpleNamespace(manifest=manifest))
        mapped: Any = SimpleNamespace(header=SimpleNamespace(key=weights, chunks=chunks))
        return _identity(artifacts, mapped)

    others = [identity(key="l"), identity(blob="c"), identity(weights="v"), identity(chunks=("1", "3"))]
    assert len({identity(), *others}) == 5
    assert identity() == identity()
