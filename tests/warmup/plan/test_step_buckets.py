"""Buckets of decode steps alone: which a plan has, what they do to the key, and which a GPU has room for."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.described import write_described

from snapcap.models.config import ModelConfig
from snapcap.models.regions.table import build_regions
from snapcap.warmup.errors import StartError
from snapcap.warmup.machine.cuda_driver import CudaDriverError
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan import plan as planning
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.memory import MemoryPlan, checkpoint_bytes, device_need, fitted, plan_that_fits
from snapcap.warmup.plan.plan import BUFFER_PART, DEFAULT_BUCKETS, STEP_BUCKETS, Plan, make_plan, planned_buffers
from snapcap.warmup.runtime.aoti.packages import entry_names

GIB = 1 << 30
SIZES = DEFAULT_BUCKETS["cuda"]
ON_GPU = Plan("cuda:0", "bfloat16", SIZES, 64, 1)


@pytest.fixture(scope="module")
def config(demo_folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(demo_folder)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each GPU of this machine."""
    sizes = [80 * GIB]
    monkeypatch.setattr(planning, "total_device_memory", sizes.__getitem__)
    return sizes


def plan(config: ModelConfig, folder: Path, **compute: Any) -> Plan:
    given = {"device": "cuda:0", "threads": 1} | compute
    return make_plan(config, StartOptions(ModelOptions(cache_dir=folder), ComputeOptions(**given)))


def test_the_sizes_are_larger_than_the_smallest_default_bucket_and_none_of_them() -> None:
    assert list(STEP_BUCKETS) == sorted({*STEP_BUCKETS} - {*SIZES})
    assert STEP_BUCKETS[0] > SIZES[0]


def test_a_gpu_has_them_by_default(config: ModelConfig, tmp_path: Path) -> None:
    found = plan(config, tmp_path)
    assert (found.buckets, found.step_buckets) == (SIZES, STEP_BUCKETS)
    assert found.sizes("encoder") == found.table.sizes == SIZES
    assert found.sizes("decoder") == found.step_table.sizes == tuple(sorted((*SIZES, *STEP_BUCKETS)))
    assert found.slots == STEP_BUCKETS[-1]


@pytest.mark.parametrize(
    "compute",
    [{"device": "cpu"}, {"buckets": (1, 4)}, {"buckets": SIZES}, {"backend": "jit"}, {"step_buckets": ()}],
    ids=["on a CPU", "of own buckets", "of the same buckets", "jit", "none"],
)
def test_there_are_none_in_other_starts_and_the_key_knows_nothing_of_them(
    compute: dict[str, Any], config: ModelConfig, tmp_path: Path
) -> None:
    found = plan(config, tmp_path, **compute)
    assert (found.step_buckets, found.step_table, found.slots) == ((), found.table, found.buckets[-1])
    factors = replace(found, device="cpu").factors(config, "aot")
    assert "model.step_buckets" not in factors


@pytest.mark.parametrize("error", [CudaDriverError("no driver"), AttributeError("cuDeviceTotalMem_v2")])
def test_a_driver_that_does_not_tell_its_memory_gives_none(
    error: Exception, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(index: int) -> int:
        raise error

    monkeypatch.setattr(planning, "total_device_memory", ask)
    assert plan(config, tmp_path).step_buckets == ()


def test_explicit_sizes_count_on_every_device_and_are_a_factor_of_the_key(
    config: ModelConfig, tmp_path: Path
) -> None:
    found = plan(config, tmp_path, device="cpu", buckets=(1, 4), step_buckets=(2, 8))
    assert (found.step_buckets, found.sizes("decoder"), found.slots) == ((2, 8), (1, 2, 4, 8), 8)
    factors = found.factors(config, "aot")
    assert (factors["model.buckets"], factors["model.step_buckets"]) == ([1, 4], [2, 8])
    assert replace(found, step_buckets=()).factors(config, "aot") == {
        name: value for name, value in factors.items() if name != "model.step_buckets"
    }


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((4, 8), "^step_buckets: 4 is in --buckets too"),
        ((1, 8), "^step_buckets: 1 is below the smallest of --buckets, 2"),
        ((8, 8), r"^step_buckets: .*distinct positive numbers, not \[8, 8\]"),
    ],
)
def test_wrong_sizes_stop_the_start(sizes: tuple[int, ...], says: str, config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=says):
        plan(config, tmp_path, buckets=(2, 4), step_buckets=sizes)


def test_pinned_options_give_the_same_plan(config: ModelConfig, tmp_path: Path) -> None:
    options = StartOptions(ModelOptions(cache_dir=tmp_path), ComputeOptions("cuda:0", threads=1))
    for kept in (plan(config, tmp_path), replace(plan(config, tmp_path), buckets=(1, 4), step_buckets=())):
        assert make_plan(config, kept.pinned(options)) == kept


def test_packages_of_a_step_bucket_are_those_of_the_decoder(config: ModelConfig) -> None:
    regions = build_regions(config)
    names = entry_names(regions, replace(ON_GPU, buckets=(1, 4), step_buckets=(2,)))
    found = {size: [region.name for region, bucket, _ in names if bucket.size == size] for size in (1, 2, 4)}
    assert {*found[1]} == {*found[4]} == {region.name for region in regions}
    decoder = [region.name for region in (*regions.decoder, *regions.choice)]
    assert found[2] == decoder
    assert [bucket.size for _, bucket, _ in names] == [1] * 6 + [2] * 3 + [4] * 6 + [1] * 3 + [2] * 3 + [4] * 3


# --- memory ---


@pytest.mark.parametrize("name", ["vit-b16-gpt2", "florence2-base", "llava-llama3-8b", "qwen3-vl-2b"])
def test_the_buffers_of_automatic_sizes_take_at_most_an_eighth_of_the_card(
    name: str, card: list[int], tmp_path: Path
) -> None:
    config = ModelConfig.from_folder(write_described(name, tmp_path / name))
    counts = []
    for size in (4, 8, 16, 24, 48, 80, 141, 1000):
        card[0] = size * GIB
        found = plan(config, tmp_path)
        counts.append(len(found.step_buckets))
        assert found.step_buckets == STEP_BUCKETS[: counts[-1]]
        if found.step_buckets:
            assert planned_buffers(config, found).size <= card[0] / 8
        if found.step_buckets != STEP_BUCKETS:
            more = replace(found, step_buckets=STEP_BUCKETS[: counts[-1] + 1])
            assert planned_buffers(config, more).size > card[0] * BUFFER_PART
    assert counts == sorted(counts)
    assert counts[-1] == len(STEP_BUCKETS)
    assert counts[0] < len(STEP_BUCKETS)


def test_images_need_buffers_for_encodes_alone(config: ModelConfig) -> None:
    height, width = config.vision.image_size
    less, more = (replace(ON_GPU, buckets=(1, size), step_buckets=(64,)) for size in (4, 8))
    assert planned_buffers(config, more).size - planned_buffers(config, less).size == 4 * height * width * 3
    assert planned_buffers(config, replace(more, step_buckets=(128,))).size > planned_buffers(config, more).size


def test_where_memory_is_short_step_buckets_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "florence2-base"
    folder = write_described(name, tmp_path / name)
    config, weights = ModelConfig.from_folder(folder), checkpoint_bytes(folder, "bfloat16")
    whole = replace(ON_GPU, step_buckets=STEP_BUCKETS)
    kept = [
        plan_that_fits(config, whole, weights, free)
        for free in range(0, MemoryPlan(config, whole).serving(weights) + GIB, GIB // 4)
    ]
    assert kept[-1] == whole
    assert kept[0] == replace(whole, buckets=SIZES[:1], step_buckets=())
    assert {each.step_buckets for each in kept} == {(), STEP_BUCKETS}, "they go all at once"
    for each in kept:
        assert each.buckets == SIZES[: len(each.buckets)]
        assert each.buckets == SIZES or not each.step_buckets
    checkpoint = Checkpoint(name, folder, config, transform=None)  # type: ignore[arg-type]  it is not asked for
    some = next(each for each in kept if each.buckets == SIZES)
    with caplog.at_level(logging.WARNING):
        assert fitted(checkpoint, whole, MemoryPlan(config, some).serving(weights)) == some
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"bucket {', '.join(map(str, STEP_BUCKETS))} is left out" in line
    assert f"{','.join(map(str, some.step_table.sizes))} are used" in line


def test_step_buckets_below_the_largest_bucket_stay_where_it_goes(tmp_path: Path) -> None:
    """They need no slots of their own, so leaving them out would save no memory."""
    folder = write_described("florence2-base", tmp_path / "florence2")
    config, weights = ModelConfig.from_folder(folder), checkpoint_bytes(folder, "bfloat16")
    whole = replace(ON_GPU, buckets=(1, 64), step_buckets=(8, 16))
    smaller = replace(whole, buckets=(1,))
    needs = {plan: MemoryPlan(config, plan).serving(weights) for plan in (whole, smaller)}
    assert plan_that_fits(config, whole, weights, needs[whole]) == whole
    assert plan_that_fits(config, whole, weights, needs[whole] - 1) == smaller
    assert plan_that_fits(config, whole, weights, needs[smaller]) == smaller
    assert plan_that_fits(config, whole, weights, needs[smaller] - 1) == replace(smaller, step_buckets=())


def test_a_servers_budget_counts_them(tmp_path: Path) -> None:
    folder = write_described("blip-base", tmp_path / "blip")
    compute = ComputeOptions("cuda:0", threads=1)
    options = StartOptions(ModelOptions(str(folder), tmp_path), compute)
    few = replace(options, compute=replace(compute, step_buckets=()))
    assert all(
        more > less for more, less in zip(device_need(options, folder), device_need(few, folder), strict=True)
    )
