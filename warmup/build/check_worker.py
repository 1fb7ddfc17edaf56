"""Checks packages in a fresh process: opens each as a server would and compares it with eager.

    stdin   the job, then {"region": …, "size": …} or {"region": …, "size": …, "on": "library"} a line
    stdout  {"entry": …, "difference": …, "digest": …, "size": …} or {"error": …} a line

With "on": "library" the package runs on the CPU library, as on a server that does not load torch's libraries.

The worker runs with AOTI_RUNTIME_CHECK_INPUTS=1, so a package also checks its inputs. A package that crashes ends
only this process.
"""

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapcap.models.dimensions import MAX_BEAMS, MAX_PHRASE_TOKENS, MAX_PHRASES
from snapcap.models.layers.weights import RegionFunction, WeightSet
from snapcap.models.memory.memory import Spec
from snapcap.models.regions.state import GRIDS, TEXTS
from snapcap.models.regions.table import Region, Weights
from snapcap.warmup.artifacts.manifest import CPU_LIBRARY, VerifiedFile
from snapcap.warmup.build.compile_worker import Workbench, empty, job_weights, serve_regions
from snapcap.warmup.machine.capacity import whole_cpus
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.aoti.native import Libtorch, NativePackages
from snapcap.warmup.runtime.aoti.packages import Containers, open_cpu_library
from snapcap.warmup.runtime.aoti.torch_packages import open_package, over_tensor, tensor_over
from snapcap.warmup.runtime.compare import CheckError, compare_call
from snapcap.warmup.runtime.model import Model
from snapcap.warmup.runtime.torch_model import DTYPES


def check(
    model: Model[Any], layer: WeightSet, region: Region, bucket: Bucket, run: RegionFunction, device: torch.device
) -> float:
    """Compare a package's function with the region's, and return the largest relative difference. ``layer``: the
    weights of one layer, on any device. Raises CheckError if the results differ by more than rounding."""
    run(*(empty(spec, device).zero_() for spec in _specs(model, region, bucket)))  # GPU starts do so
    dtype = torch.int8 if any(each.dtype == torch.int8 for each in layer) else DTYPES[model.state.dtype]
    worst = 0.0
    for padding in (False, True):
        inputs = example_inputs(model, layer, region, bucket, padding, device)
        worst = max(worst, compare_call(region.function, run, inputs, dtype))
    return worst


def _specs(model: Model[Any], region: Region, bucket: Bucket) -> list[Spec]:
    return [model.state.memory.spec(buffer) for buffer in model.inputs(region, bucket)]


def example_inputs(
    model: Model[Any], layer: WeightSet, region: Region, bucket: Bucket, padding: bool, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns random activations and caches on ``device``, with rows at different positions, and a ``layer``'s
    weights.

    With ``padding`` all rows but the first are padding rows: at the cache's end, or in the scratch slot. There they
    are all equal, because the result of several writes to one slot is undefined."""
    generator = torch.Generator().manual_seed(bucket.size + 1000 * padding)
    length, vocabulary = model.state.cache_length, model.config.decoder.vocab_size
    drawn: dict[str, Tensor] = {}
    if region.on_demand:
        drawn = example_groups(bucket.size, min(MAX_BEAMS, model.state.slots), generator)
        drawn |= _scores_apart(bucket.size, vocabulary, generator) | _sampling(bucket.size, generator)
        drawn |= {"normalised": torch.tensor([padding]), "ngrams": torch.arange(bucket.size) % 4}
        drawn |= _rules(length, vocabulary, bucket.size, generator)

    def random_like(name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8:
            return torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
        if name in ("ends", "before", "penalised"):
            return torch.rand(tensor.shape, generator=generator) < 0.1
        if name == "uniforms":
            return torch.rand(tensor.shape, generator=generator)
        if name in ("divisors", "penalty"):
            return torch.rand(tensor.shape, generator=generator) + 0.5
        return torch.randn(tensor.shape, generator=generator)

    def integers(name: str, shape: torch.Size) -> Tensor:
        if name == "slots":
            slots = torch.arange(bucket.size)
            slots[1:] = model.state.slots if padding else slots[1:]
            return slots
        if name == "positions":
            positions = torch.randint(0, length, shape, generator=generator)
            positions[1:] = length - 1 if padding else positions[1:]
            return positions
        if name == "forced":
            free = torch.rand(shape, generator=generator) < 0.5
            return torch.where(free, -1, torch.randint(0, vocabulary, shape, generator=generator))
        if name in GRIDS:  # pictures of all sizes
            return torch.randint(1, 1 + math.isqrt(model.config.vision.image_tokens), shape, generator=generator)
        drawn = torch.randint(0, length if name == "lasts" else vocabulary, shape, generator=generator)
        if name in TEXTS:  # texts of different lengths
            lengths = torch.arange(shape[0]) % (shape[1] + 1)
            return torch.where(torch.arange(shape[1]) < lengths.unsqueeze(1), drawn, -1)
        return drawn

    names = region.input_names
    specs = _specs(model, region, bucket)

    def example(name: str, tensor: Tensor) -> Tensor:
        if name in drawn:
            return drawn[name]
        return integers(name, tensor.shape) if tensor.dtype == torch.int64 else random_like(name, tensor)

    # A package only takes the strides that the input has when serving.
    examples = []
    for name, spec in zip(names, specs[: len(names)], strict=True):
        tensor = empty(spec, device)
        examples.append(tensor.copy_(example(name, tensor)))
    if padding and region.component == "encoder" and bucket.size > 1:
        examples[0][1:] = examples[0][1]
    weights = [empty(spec, device) for spec in specs[len(names) :]]
    return (*examples, *(placed.copy_(weight) for placed, weight in zip(weights, layer, strict=True)))


def example_groups(rows: int, most: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns `BeamState`'s group inputs for beam searches over rows in random order. Each search has ``most``
    rows, and the last search has the rows that are left."""
    members = torch.zeros(rows, most, dtype=torch.int64)
    inside, ranks = members.bool(), members[:, :1].repeat(1, 2)
    order = torch.randperm(rows, generator=generator)
    for group in (order[first : first + most] for first in range(0, rows, most)):
        members[group, : len(group)] = group
        inside[group, : len(group)] = True
        ranks[group] = torch.tensor([[rank, len(group) - 1] for rank in range(len(group))])
    return {"members": members, "inside": inside, "ranks": ranks}


def _scores_apart(rows: int, vocabulary: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns scores of beams and tokens whose sums differ by more than rounding, so that both sides choose the
    same tokens. Each row has the same logits in another order, so that the softmax has the same denominator."""
    order = torch.rand(rows, vocabulary, generator=generator).argsort(dim=1)
    scores = torch.randint(-8, 0, (rows,), generator=generator) / 4 + torch.arange(rows) / (16 * rows)
    return {"logits": order / -16, "scores": scores}


def _rules(length: int, vocabulary: int, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns phrases with distinct last tokens, half of which match any preceding token; ends that are encouraged
    or excluded; and rows of which some choose their first token."""
    phrases = torch.full((MAX_PHRASES, MAX_PHRASE_TOKENS), -1)
    phrases[:, -1] = torch.arange(MAX_PHRASES) % vocabulary
    phrases[::2, -2] = torch.randint(0, vocabulary, (MAX_PHRASES // 2,), generator=generator)
    endings = torch.rand(rows, length, generator=generator)
    return {
        "phrases": phrases,
        "endings": torch.where(endings < 0.3, float("-inf"), endings),
        "firsts": torch.randint(0, length, (rows,), generator=generator),
    }


def _sampling(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns sampling inputs for rows of which some sample and some do not. At most 16 tokens are candidates, so
    that a random number hardly ever falls so close to the edge of a token that rounding decides."""
    temperature = torch.rand(rows, generator=generator) * 2
    return {
        "temperature": torch.where(temperature < 0.5, 0.0, temperature),
        "top_k": torch.randint(1, 17, (rows,), generator=generator),
        "top_p": torch.rand(rows, generator=generator) / 2 + 0.5,
    }


class _Checker:
    """Checks packages. Reads the weights and opens the CPU library once, when a package first needs them."""

    def __init__(self) -> None:
        self._library: Libtorch | None = None
        self._weights: Weights[Tensor] | None = None

    def answer(
        self, bench: Workbench, region: Region, bucket: Bucket, path: Path, on: str = "libtorch"
    ) -> dict[str, Any]:
        if self._weights is None:
            self._weights = job_weights(bench.job, bench.model.config, torch.device("cpu"))
        package = VerifiedFile.of(path)
        try:
            run = open_package(package, bench.device) if on == "libtorch" else self._on_library(package)
            layer = self._weights.of(region)[-1]
            return {
                "difference": check(bench.model, layer, region, bucket, run, bench.device),
                **asdict(package.blob),
            }
        except CheckError as error:
            raise RuntimeError(f"differs from eager: {error}") from error

    def _on_library(self, package: VerifiedFile) -> RegionFunction:
        """Returns a package's function, which takes torch's tensors and runs on the CPU library of the build."""
        if self._library is None:
            library = package.path.parent / Path(CPU_LIBRARY).name
            self._library = Libtorch(open_cpu_library(VerifiedFile.of(library)))
            self._library.set_num_threads(whole_cpus())
        libtorch = self._library
        opened = Containers("cpu", standalone=True).open(package.path.name, package)
        call = NativePackages(libtorch).function_of(opened)

        def run(*inputs: Tensor) -> Tensor:
            return tensor_over(call(*(over_tensor(libtorch, tensor) for tensor in inputs)))

        return run


if __name__ == "__main__":
    sys.exit(serve_regions(_Checker().answer))
