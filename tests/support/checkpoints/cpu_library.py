"""Compiles the CPU library as a build does, and a program of its vector functions; makes tensors to give it."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from snapcap.warmup.artifacts.manifest import CPU_LIBRARY
from snapcap.warmup.build.library_worker import compile_library, compiler_options
from snapcap.warmup.machine.installation import require_compiler
from snapcap.warmup.runtime.aoti.packages import SOURCES

LAYOUTS = ("rows", "columns", "apart")
_EVERY = """
#include "vector.h"
using namespace snapcap;
#define JOIN(a, b, c) a##b##c
#define NAME(name, width) JOIN(Sleef_##name##f, width, _u10)
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define EVERY(name)                                                                         \\
  extern "C" Vector NAME(name, WIDTH)(Vector);                                              \\
  extern "C" __attribute__((visibility("default"))) void every_##name(const float* from, float* to, int count) { \\
    for (int i = 0; i < count; i += kWidth) store(to + i, NAME(name, WIDTH)(load(from + i))); \\
  }
EVERY(exp) EVERY(log) EVERY(sin) EVERY(cos) EVERY(tanh) EVERY(erf)
"""


def compiled_library(folder: Path, program: str = "") -> Path:
    """The library in a folder, or a ``program`` that has its functions and calls them."""
    if not program:
        compile_library(folder, CPU_LIBRARY)
        return folder / CPU_LIBRARY
    source, made = folder / f"{program}.cpp", folder / f"{program}.so"
    source.write_text(_EVERY)
    sources = [str(source), str(SOURCES / "functions.cpp")]
    command = [require_compiler(), *compiler_options(SOURCES), f"-I{SOURCES}", "-o", str(made), *sources]
    subprocess.run(command, check=True, timeout=120)
    return made


def laid_out(shape: Sequence[int], layout: str, seed: int = 0) -> Tensor:
    """Random numbers: ``rows``, ``columns`` (the last two dimensions turned around) or ``apart`` (with gaps)."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "columns":
        return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).mT
    if layout == "apart":
        return torch.randn(*shape[:-1], 2 * shape[-1] + 3, generator=generator)[..., 1 : 2 * shape[-1] + 1 : 2]
    return torch.randn(*shape, generator=generator)
