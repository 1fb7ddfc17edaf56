"""A bucket moves from eager to compiled only where both give the same, in every cache that an encode writes."""

import pytest
import torch
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import write_chat_files
from support.parity.parity import build_runner
from torch import Tensor

from snapcap.models.regions.table import RegionCall
from snapcap.warmup.plan.plan import Bucket, BucketTable
from snapcap.warmup.progress.status import COMPONENTS
from snapcap.warmup.runtime.compare import CheckError
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Callables, Runner, open_callables
from snapcap.warmup.start.background_build import check_bucket

BUCKET = Bucket(2)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runner]:
    """SmolVLM's encode reads a prompt's tokens and writes a row's own K/V; Florence-2's reads a task's."""
    made = {}
    for family in ("smolvlm", "florence2"):
        folder = tmp_path_factory.mktemp(family)
        getattr(random_captioners, family)(seed=2).save_pretrained(folder)
        write_chat_files(folder)
        made[family] = build_runner(folder, BucketTable.of((1, 2)))
    return made


def with_region(runner: Runner, names: tuple[str, ...], change: "type[Broken]") -> Callables:
    """The eager encoder with these regions changed."""
    eager = open_callables(runner.regions, "encoder", BUCKET, EagerBackend())
    regions = zip(runner.regions.encoder, eager.regions, strict=True)
    return Callables(tuple(change(call) if region.name in names else call for region, call in regions))


class Broken:
    """A region that computes something else."""

    def __init__(self, call: RegionCall) -> None:
        self.call = call


class Unread(Broken):
    """The third input, which holds texts, is read as one without a token."""

    def __call__(self, hidden: Tensor, slots: Tensor, texts: Tensor, *rest: Tensor) -> object:
        return self.call(hidden, slots, torch.full_like(texts, -1), *rest)


class Unwritten(Broken):
    """A row's own K/V stay as they are."""

    def __call__(self, *inputs: Tensor) -> object:
        own = inputs[4:6]
        before = [cache.clone() for cache in own]
        out = self.call(*inputs)
        for cache, kept in zip(own, before, strict=True):
            cache.copy_(kept)
        return out


@pytest.mark.parametrize("family", ["smolvlm", "florence2"])
def test_the_same_regions_are_accepted(runners: dict[str, Runner], family: str) -> None:
    runner = runners[family]
    for component in COMPONENTS:
        eager = open_callables(runner.regions, component, BUCKET, EagerBackend())
        check_bucket(runner, component, BUCKET, eager, eager)


@pytest.mark.parametrize(
    ("family", "names", "change"),
    [
        ("smolvlm", ("prefix_before",), Unread),
        ("smolvlm", ("prefix_block", "prefix_after"), Unwritten),
        ("florence2", ("prefix_before", "prefix_block"), Unread),
    ],
)
def test_an_encoder_that_leaves_the_text_out_is_refused(
    runners: dict[str, Runner], family: str, names: tuple[str, ...], change: type[Broken]
) -> None:
    runner = runners[family]
    assert {*names} <= {region.name for region in runner.regions.encoder}
    eager = open_callables(runner.regions, "encoder", BUCKET, EagerBackend())
    with pytest.raises(CheckError):
        check_bucket(runner, "encoder", BUCKET, with_region(runner, names, change), eager)


def test_a_decoder_that_sees_behind_a_texts_end_is_refused(runners: dict[str, Runner]) -> None:
    runner = runners["florence2"]
    eager = open_callables(runner.regions, "decoder", BUCKET, EagerBackend())
    names = [region.name for region in runner.regions.decoder]
    calls = zip(names, eager.regions, strict=True)
    regions = (Unread(call) if name == "decoder_block" else call for name, call in calls)
    with pytest.raises(CheckError):
        check_bucket(runner, "decoder", BUCKET, eager._replace(regions=tuple(regions)), eager)
