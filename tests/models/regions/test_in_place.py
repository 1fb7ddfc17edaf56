"""Regions write K/V into the caches that they are given, and not into copies of these that are copied back.

Inductor writes in place where what is indexed is the cache itself: a view of it, or a scatter, costs two copies of
all slots.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity import device_cases
from support.parity.device_cases import open_model, plan_of
from torch.fx import Node

from snapcap.models.layers import cross_kv
from snapcap.models.layers.weights import RegionFunction
from snapcap.models.regions.table import Region
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.torch_model import LoadedModel

CROSSED = (device_cases.vit_gpt2, device_cases.blip, device_cases.git, device_cases.florence2)
FAMILIES = (*CROSSED, device_cases.smolvlm, device_cases.qwen3_vl)
Family = Callable[[Path], device_cases.Captioner]
_WRITES = (torch.ops.aten.index_put.default,)


class _Module(torch.nn.Module):
    def __init__(self, function: RegionFunction) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._function(*inputs)


def copied(model: LoadedModel, region: Region, bucket: Bucket) -> list[str]:
    """Caches that the region writes otherwise than by indexing them, by its name for them."""
    inputs = model.inputs(region, bucket)
    program = torch.export.export(_Module(region.function), inputs).run_decompositions({})
    nodes: dict[str, Node] = {node.name: node for node in program.graph.nodes}
    places = {name: place for place, name in enumerate(program.graph_signature.user_inputs)}
    found = []
    for output, name in program.graph_signature.user_inputs_to_mutate.items():
        node: Any = nodes[output]
        while node.target in _WRITES:
            node = node.args[0]
        if node.name != name and inputs[places[name]].is_floating_point():
            found.append(region.input_names[places[name]])
    return found


def assert_written_in_place(family: Family, folder: Path, *components: str) -> None:
    """Asserts it of the components' regions that have caches."""
    plan = plan_of(torch.device("cpu"), "float32", (2,))
    model = open_model(family(folder), plan)
    regions = [region for region in model.regions if not region.on_demand and len(region.input_names) > 3]
    writing = [region for region in regions if region.component in components]
    assert {region.component for region in writing} == {*components}
    with torch.no_grad():
        assert {region.name: copied(model, region, plan.table.largest) for region in writing} == {
            region.name: [] for region in writing
        }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.__name__))
def test_caches_are_written_where_they_are(family: Family, tmp_path: Path) -> None:
    assert_written_in_place(family, tmp_path, "encoder", "decoder")


@pytest.mark.parametrize("family", CROSSED, ids=lambda family: str(family.__name__))
def test_caches_are_written_where_they_are_a_layer_at_a_time(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder alone writes several layers."""
    monkeypatch.setattr(cross_kv, "_CACHED", 1)
    assert_written_in_place(family, tmp_path, "encoder")


@pytest.mark.parametrize("numbers", [1, 2 * 3 * 5 * 2 * 8, 1 << 20])
def test_keys_and_values_are_the_same_some_layers_at_a_time(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers: one, two and all at a time. The weight's last outputs are keys and values."""
    monkeypatch.setattr(cross_kv, "_CACHED", numbers)
    states, slots = torch.randn(3, 5, 6), torch.tensor([2, 0, 1])
    weight, bias = torch.randn(4 + 5 * 2 * 8, 6), torch.randn(4 + 5 * 2 * 8)
    keys, values = torch.zeros(5, 4, 2, 4, 5), torch.zeros(5, 4, 2, 5, 4)
    cross_kv.write_cross_kv(states, slots, keys, values, weight, bias)
    both = (states @ weight[4:].T + bias[4:]).view(3, 5, 5, 2, 2, 4)  # row, token, layer, key or value, head
    for row, slot in enumerate(slots):
        torch.testing.assert_close(keys[:, slot], both[row, :, :, 0].permute(1, 2, 3, 0))
        torch.testing.assert_close(values[:, slot], both[row, :, :, 1].permute(1, 2, 0, 3))
    assert not keys[:, 3].any()
    assert not values[:, 3].any()
