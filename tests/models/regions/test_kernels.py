"""The Triton kernels against the plain regions, in the interpreter: no GPU is needed to see that they agree."""

import ast
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from snapcap.models.config import ModelConfig
from snapcap.models.layers import gpt2, vit
from snapcap.models.layers.fused import compiled_function
from snapcap.models.layers.linear import activation
from snapcap.models.layers.weights import weight_names
from snapcap.models.regions.table import build_regions

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models" / "demo"
TRITON = Path(sys.prefix) / "triton"  # where `make test` puts it: beside torch's CPU build, not into it


def with_triton(program: str, **variables: str) -> Any:
    """Runs a program of `support.parity` with Triton, and returns what it prints."""
    if not (TRITON / "triton").is_dir():
        pytest.skip("TRITON IS NOT INSTALLED (make test DOES THAT ON LINUX): THE KERNELS ARE NOT CHECKED")
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(TRITON), str(ROOT)])}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/parity" / program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def test_every_fused_region_gives_what_the_plain_one_does() -> None:
    differences: dict[str, float] = with_triton("kernel_cases.py", TRITON_INTERPRET="1")
    assert len(differences) == 79
    assert {name: d for name, d in differences.items() if not d < 2e-5} == {}


def test_every_kernel_of_a_step_and_attention_of_encoders_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter does not check types, and a build on a GPU is too late to notice."""
    compiled: list[str] = with_triton("compiled_kernels.py", TRITON_CACHE_DIR=str(tmp_path))
    assert len(compiled) > 20
    assert {*compiled} == {
        *("_few_rows_ahead", "_many_rows_ahead", "_sum_ahead", "_norm_ahead", "_choose_ahead"),
        *("_attend_cached_ahead", "_attend_cross_ahead", "_attend_prefixed_ahead", "_attend_padded"),
    }


def test_cuda_is_compiled_from_kernels_in_16_bits_and_beams_in_any() -> None:
    regions = build_regions(ModelConfig.from_folder(DEMO))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for region in regions:
        assert compiled_function(region.function, cpu, torch.float32) is region.function
        assert compiled_function(region.function, cpu, torch.bfloat16) is region.function
    fused = {
        dtype: [r.name for r in regions if compiled_function(r.function, cuda, dtype) is not r.function]
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert fused[torch.float32] == ["decoder_beams"]
    assert fused[torch.bfloat16] == [
        "encoder_block",
        "encoder_after",
        "decoder_block",
        "decoder_after",
        "decoder_beams",
    ]


@pytest.mark.parametrize("relative", [False, True], ids=["vit", "beit"])
def test_the_encoder_block_with_the_activation_as_epilogue_is_the_plain_one_within_rounding(
    relative: bool,
) -> None:
    config = ModelConfig.from_folder(DEMO)
    region = build_regions(config)["encoder_block"]
    width, inner = config.vision.hidden_size, config.vision.intermediate_size
    shapes = {"qkv": (3 * width, width), "out": (width, width), "fc1": (inner, width), "fc2": (width, inner)}
    torch.manual_seed(0)
    weights = []
    for name, must in weight_names(vit.block).items():
        if not must:
            continue
        layer, _, kind = name.partition("_")
        shape = shapes.get(layer, (width,))
        weights.append(torch.randn(shape if kind == "weight" else shape[:1], dtype=torch.bfloat16) * 0.05)
    if relative:
        weights.append(torch.randn(1, config.vision.num_heads, 5, 5, dtype=torch.bfloat16))
    hidden = torch.randn(2, 5, width, dtype=torch.bfloat16)
    kernels = compiled_function(region.function, torch.device("cuda"), torch.bfloat16)
    fused = partial(kernels, attend=vit.attend)  # the kernel's cases are in `kernel_cases`
    torch.testing.assert_close(fused(hidden, *weights), region.function(hidden, *weights), atol=2e-2, rtol=2e-2)


def test_an_activation_that_the_kernels_do_not_have_keeps_the_plain_function() -> None:
    block = partial(gpt2.block, eps=1e-5, scale=0.125, act=activation("quick_gelu"))
    assert compiled_function(block, torch.device("cuda"), torch.bfloat16) is block


def test_a_kernel_is_called_ahead_if_and_only_if_it_waits_for_the_one_in_front() -> None:
    """A graph lets kernels begin early by this name. Every program must wait: at the kernel's top level, and not in
    a branch or a loop."""
    kernels = 0
    for path in sorted((ROOT / "models" / "kernels").glob("*.py")):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef) or function.name == "wait_for_last":
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            waits = [call for call in calls if getattr(call.func, "id", "") == "wait_for_last"]
            assert len(waits) == function.name.endswith("_ahead"), f"{path.name}: {function.name}"
            for call in waits:
                kernels += 1
                (statement,) = [each for each in function.body if call in ast.walk(each)]
                assert isinstance(statement, ast.Assign | ast.AugAssign), f"{path.name}: {function.name}"
    assert kernels == 10
