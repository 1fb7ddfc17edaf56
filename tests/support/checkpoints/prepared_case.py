"""Prepares weights of a checkpoint that tests may change, in an artifact folder of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from snapcap.warmup.artifacts.store import WEIGHTS
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint, read_checkpoint
from snapcap.warmup.plan.plan import Plan, make_plan
from snapcap.warmup.weights.find import FoundWeights, find_weights
from snapcap.warmup.weights.prepare import Prepared, prepare_weights

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A checkpoint of its own, and an artifact folder."""

    options: StartOptions
    checkpoint: Checkpoint
    plan: Plan

    @property
    def weights(self) -> Path:
        return self.options.store_folder / WEIGHTS

    def find(self, **plan: Any) -> FoundWeights:
        return find_weights(self.checkpoint, replace(self.plan, **plan), self.options.store_folder)

    def prepare(self, thorough: bool = False, **plan: Any) -> Prepared:
        given = replace(self.plan, **plan)
        return prepare_weights(self.checkpoint.folder, given, self.options.store_folder, thorough=thorough)

    def file(self) -> Path:
        (file,) = self.weights.glob("*.safetensors")
        return file

    def is_clean(self) -> bool:
        """Returns whether the store has no half-written file."""
        files = [path for path in self.options.store_folder.rglob("*") if path.is_file() and path.name != ".lock"]
        return all(path.parent == self.weights and path.suffix in (".safetensors", ".json") for path in files)


def case_of(folder: Path, cache: Path) -> Case:
    options = StartOptions(
        ModelOptions(str(folder), cache), ComputeOptions("cpu", "float32", buckets=(1,), threads=1)
    )
    checkpoint = read_checkpoint(options)
    return Case(options, checkpoint, make_plan(checkpoint.config, options))


def prepared_files(case: Case) -> set[Path]:
    return set(case.weights.glob("*.safetensors"))


def rewrite(folder: Path) -> None:
    """Other weights of the same shapes, in a file of the same size."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, name: tensors[name] + 1}, path)
