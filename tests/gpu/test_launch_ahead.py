"""Kernels that begin before the one in front has ended give what kernels in order give, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.parity.device_cases import BUCKETS, Captioner, open_model, open_runner, plan_of
from torch import Tensor

from snapcap.warmup.runtime.aoti.launch_ahead import LEAST_MAJOR, GraphEdges
from snapcap.warmup.runtime.slot_request import SlotRequest

pytestmark = pytest.mark.timeout(600)  # compiling
STEPS, REPLAYS, WIDTH, DIVIDED = 12, 50, 256, 1100


@pytest.fixture(autouse=True)
def launches_ahead(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < LEAST_MAJOR:
        pytest.skip("NO DEVICE HERE LAUNCHES KERNELS EARLY")


@pytest.mark.parametrize("family", ["vit-gpt2", "blip", "git", "smolvlm", "florence2"])
def test_steps_of_packages(
    family: str,
    captioners: dict[str, Captioner],
    packages: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captioner = captioners[family]
    plan = plan_of(device, "bfloat16", BUCKETS[family])
    model = open_model(captioner, plan)
    runner = open_runner(model, plan, packages.backend(family, "bfloat16", model))
    early = runner.device._edges
    assert early is not None
    changed: list[int] = []
    launch_ahead = early.launch_ahead
    monkeypatch.setattr(early, "launch_ahead", lambda graph: changed.append(launch_ahead(graph)))
    for bucket in plan.table.buckets:
        found: list[tuple[list[list[int]], Tensor]] = []
        for edges in (None, early):
            runner.device._edges = edges
            runner.capture("decoder", bucket)
            runner.encode(bucket, captioner.images(bucket.size), 0)
            runner.admit(0, [SlotRequest()] * bucket.size)
            tokens = []
            for _ in range(STEPS):
                logits = runner.decode_step(bucket)
                tokens.append(runner.tokens(bucket.size))
            found.append((tokens, logits.clone()))
        (in_order, expected), (ahead, logits) = found
        assert ahead == in_order
        assert torch.equal(logits, expected)
    assert len(changed) == len(plan.table.buckets)
    assert min(changed) > 5


@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_a_kernel_waits_for_a_slow_one(rows: int, device: torch.device) -> None:
    from snapcap.models.kernels.linear import linear, norm

    torch.manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    large, source = random(8192, 8192), random(rows, WIDTH)
    wide, narrow = random(WIDTH, DIVIDED) / 16, random(DIVIDED, WIDTH) / 32
    gamma, beta = random(WIDTH), random(WIDTH)

    def run() -> Tensor:
        slow = (large @ large)[:rows, :WIDTH] * 0 + source  # takes a millisecond
        inner = linear(norm(slow, gamma, beta, 1e-5), wide, None, gamma, beta, None, 1e-5, "relu")
        return linear(inner, narrow, None, None, None, slow, 1e-5, "")

    results = []
    edges = GraphEdges.of_device(torch.cuda.get_device_capability(device)[0])
    assert edges is not None
    for change in (lambda graph: 0, edges.launch_ahead):
        replay, output, changed = recorded(run, change)
        seen = []
        for turn in range(REPLAYS):
            source.copy_(torch.full_like(source, turn) + torch.arange(WIDTH, device=device) / 8)
            replay()
            seen.append(output.clone())
        results.append((changed, torch.stack(seen)))
    (none, expected), (some, found) = results
    assert (none, some >= 3) == (0, True)
    assert torch.equal(found, expected)


def recorded(run: Callable[[], Tensor], change: Callable[[int], int]) -> tuple[Callable[[], None], Tensor, int]:
    """Returns what replays a graph, its output, and how many kernels of it begin early."""
    run()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        output = run()
    changed = change(graph.raw_cuda_graph())
    graph.instantiate()
    return graph.replay, output, changed
