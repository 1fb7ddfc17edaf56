"""What is launched beside the import of torch is what the eager regions launch afterwards."""

import logging
from collections.abc import Iterator

import pytest
import torch
from support.fakes.recorded_launches import expected_and_run, missing
from support.parity.device_cases import Captioner

from snapcap.warmup.runtime.devices.torch_settings import DTYPES, avoid_driver_compilation
from snapcap.warmup.start.ahead import launch_ahead


@pytest.fixture(autouse=True)
def as_served() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    avoid_driver_compilation()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("family", ["vit-gpt2", "blip", "git"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_are_those_of_a_first_caption_and_run(
    dtype: str,
    family: str,
    captioners: dict[str, Captioner],
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected, run = expected_and_run(captioners[family], device, dtype, 4)
    assert len(expected) > 20
    on_cuda = device.type == "cuda"
    assert missing(expected, run, on_cuda) == []
    here = [launch for launch in expected if on_cuda or "attention" not in launch.operator]
    with caplog.at_level(logging.WARNING, "snapcap.start"):
        launch_ahead(here, str(device))
    assert caplog.records == [], "nothing failed"
