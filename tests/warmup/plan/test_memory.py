"""What a model is said to need of a device, beside what its buffers and functions take."""

import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.described import write_described
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from snapcap.models.config import ModelConfig
from snapcap.models.memory.memory import spec_bytes
from snapcap.models.regions.state import CACHES
from snapcap.warmup.build.compile_worker import empty, open_workbench
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.memory import PROCESS_BYTES, MemoryPlan, checkpoint_bytes, fitted, plan_that_fits
from snapcap.warmup.plan.plan import Bucket, Plan, PlannedJob, planned_buffers
from snapcap.warmup.runtime.torch_model import LoadedModel

GIB = 1 << 30
ON_GPU = Plan("cuda:0", "bfloat16", (1, 4, 16, 64), 64, 1)


class _Live(TorchDispatchMode):
    """Counts the bytes of what operators return, while it lives."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        """``inputs``: what is there before, which views of it do not count."""
        super().__init__()
        self.peak = self._live = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._known:
            return
        self._known.add(place)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._freed, place, size)

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._live -= size


@pytest.mark.parametrize(
    "name",
    ["vit-b16-gpt2", "blip-base", "git-base", "florence2-base", "smolvlm-256m", "llava-llama3-8b", "qwen3-vl-2b"],
)
def test_no_region_takes_more_than_is_planned_for_it(name: str, tmp_path: Path) -> None:
    plan = replace(ON_GPU, device="cpu", buckets=(4, 16))
    bench = open_workbench(PlannedJob(write_described(name, tmp_path / name), plan, tmp_path))
    memory = MemoryPlan(bench.model.config, plan)
    weights = checkpoint_bytes(tmp_path / name, plan.dtype)
    for region in bench.model.regions:
        specs = bench.model.inputs(region, Bucket(16))
        with FakeTensorMode():
            inputs = tuple(empty(spec, bench.device) for spec in specs)
            live = _Live(inputs)
            with live:
                region.function(*inputs)
        held = sum(map(spec_bytes, specs))
        planned = memory.package(region, 16, weights)
        assert 2 * held + live.peak <= planned, (region.name, held, live.peak, planned)


def _in_folder(tensors: dict[str, Tensor], folder: Path) -> None:
    (folder / "parts").mkdir()
    save_file(tensors, folder / "parts" / "a.safetensors")
    places = dict.fromkeys(tensors, "parts/a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _beside_others(tensors: dict[str, Tensor], folder: Path) -> None:
    for name in ("model", "consolidated"):
        save_file(tensors, folder / f"{name}.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")


def _beside_training(tensors: dict[str, Tensor], folder: Path) -> None:
    for name in ("pytorch_model", "optimizer"):
        torch.save(tensors, folder / f"{name}.bin")


def _in_16_bits(tensors: dict[str, Tensor], folder: Path) -> None:
    (folder / "config.json").write_text('{"torch_dtype": "float16"}')
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, folder / "pytorch_model.bin")


@pytest.mark.parametrize("write", [_in_folder, _beside_others, _beside_training, _in_16_bits])
def test_the_weights_that_a_start_reads_are_counted(
    write: Callable[[dict[str, Tensor], Path], None], tmp_path: Path
) -> None:
    write({"a": torch.zeros(1000, 1000)}, tmp_path)
    assert checkpoint_bytes(tmp_path, "bfloat16") == pytest.approx(2_000_000, rel=0.01)


@pytest.mark.parametrize(("name", "halved"), [("vit-b16-gpt2", True), ("git-base", True), ("smolvlm-256m", False)])
def test_keys_and_values_of_images_take_half_the_memory_with_weights_in_int8_unless_heads_share_them(
    name: str, halved: bool, tmp_path: Path
) -> None:
    config = ModelConfig.from_folder(write_described(name, tmp_path / name))
    of = {
        dtype: planned_buffers(config, replace(ON_GPU, device="cpu", dtype=dtype)) for dtype in ("float32", "int8")
    }
    for cache in CACHES:
        kinds = {dtype: getattr(buffers.state, cache)[0] for dtype, buffers in of.items()}
        assert kinds == {
            "float32": "float32",
            "int8": "bfloat16" if halved and cache.startswith("cross") else "float32",
        }
    image = spec_bytes(of["int8"].state.cross_key) + spec_bytes(of["int8"].state.cross_value)
    assert of["float32"].size - of["int8"].size == halved * image


def test_a_worker_describes_what_a_start_allocates(demo_model: LoadedModel, tmp_path: Path) -> None:
    folder, plan = Path("models/demo"), Plan("cpu", "float32", (1, 4), demo_model.state.cache_length, 1)
    model = open_workbench(PlannedJob(folder, plan, tmp_path)).model
    for region in demo_model.regions:
        assert model.input_specs(region, Bucket(4)) == demo_model.input_specs(region, Bucket(4)), region.name


@pytest.mark.parametrize(
    ("name", "card", "sizes"),
    [
        ("vit-b16-gpt2", 8, (1, 4, 16, 64)),
        ("vit-b16-gpt2", 2, (1, 4)),
        ("blip-base", 8, (1, 4, 16, 64)),
        ("blip-base", 3, (1, 4, 16)),
        ("git-base", 8, (1, 4, 16, 64)),
        ("florence2-base", 8, (1, 4, 16)),
        ("florence2-base", 24, (1, 4, 16, 64)),
        ("smolvlm-256m", 8, (1, 4, 16, 64)),
        ("llava-llama3-8b", 24, (1, 4, 16)),
        ("llava-llama3-8b", 8, (1,)),
        ("qwen3-vl-2b", 8, (1, 4, 16)),
        ("qwen3-vl-2b", 16, (1, 4, 16, 64)),
    ],
)
def test_the_buckets_that_a_card_has_room_for(
    name: str, card: int, sizes: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_described(name, tmp_path / name)
    config, weights = ModelConfig.from_folder(folder), checkpoint_bytes(folder, "bfloat16")
    free = int(card * 0.95 * GIB) - PROCESS_BYTES
    assert plan_that_fits(config, ON_GPU, weights, free).buckets == sizes
    checkpoint = Checkpoint(name, folder, config, transform=None)  # type: ignore[arg-type]  it is not asked for
    with caplog.at_level(logging.WARNING):
        assert fitted(checkpoint, ON_GPU, free).buckets == sizes
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (sizes != ON_GPU.buckets)
    assert all("left out" in line and ",".join(map(str, sizes)) in line for line in lines)
    assert fitted(checkpoint, ON_GPU, None) == ON_GPU
