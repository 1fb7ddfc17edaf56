"""Work between two steps changes nothing that a running row reads: a bucket that runs, images that move."""

from pathlib import Path

import pytest
import torch
from support.parity import device_cases
from support.parity.aside import changed, run_aside, tokens
from support.parity.device_cases import FEW_BUCKETS, open_model, open_runner, plan_of

from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest
from snapcap.warmup.runtime.torch_model import LoadedModel, torch_device


@pytest.mark.parametrize("family", ["vit_gpt2", "blip", "git", "smolvlm", "llava", "florence2", "qwen3_vl"])
def test_rows_that_run_have_the_tokens_that_they_have_without_it(family: str, tmp_path: Path) -> None:
    captioner = getattr(device_cases, family)(tmp_path)
    plan = plan_of(torch.device("cpu"), "float32", FEW_BUCKETS)
    four = plan.table.largest
    with torch.no_grad():
        runner = open_runner(open_model(captioner, plan), plan, EagerBackend())
        expected = tokens(runner, four, captioner)
        assert changed(runner, four) == []
        assert tokens(runner, four, captioner, lambda: run_aside(runner, four)) == expected
        for buffer in runner.state.buffers.values():
            buffer.fill_(1)  # so that the run shows where it writes
        run_aside(runner, four)
        assert (runner.state.key[..., -1] != 1).any(), "the last position"
        assert (runner.state.cross_value[:, -1] != 1).any(), "the scratch slot"


def test_an_image_that_moves_takes_no_beams_of_an_earlier_search_with_it(demo_model: LoadedModel) -> None:
    """The slot's last search stood beside a slot in which another search runs by now."""
    runner = Runner(demo_model, torch_device(torch.device("cpu"))).twin()
    search = SlotRequest(params=SamplingParams(num_beams=2), new_tokens=5)
    for slots in ((1, 2), (1, 3)):
        runner.admit(1, [search])
        runner.group(slots, search)
    members = runner._choice.beams.members
    runner.move_images([(2, 0)])
    assert members[1, :2].tolist() == members[3, :2].tolist() == [1, 3]
    runner.move([(3, 2)])
    assert members[1, :2].tolist() == members[2, :2].tolist() == [1, 2]
