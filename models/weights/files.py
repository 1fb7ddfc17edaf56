"""Reads the tensors of a checkpoint folder, from safetensors or ``.bin`` files, whole or sharded."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.weights.listing import WeightsError, weight_files


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, memory-mapped on the CPU, in the dtype of the file.

    ``.bin`` files are pickles: they are read with ``weights_only=True``, which runs no code.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors.update(_read(path))
        except pickle.UnpicklingError as error:  # torch's own text advises to read it unsafely
            raise WeightsError(
                f"{path.name} is refused: it is damaged, or holds more than tensors, which could run code; "
                "save the model as safetensors"
            ) from error
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            raise WeightsError(f"{path.name} cannot be read: {_first_line(error)}") from error
        except Exception as error:  # safetensors raises its own type, which derives from Exception alone
            raise WeightsError(f"{path.name} is damaged: {_first_line(error)}") from error
    return tensors


def _first_line(error: Exception) -> str:
    """torch explains a bad pickle on a page of its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file  # noqa: PLC0415  only where it is needed

        return load_file(path)
    with path.open("rb") as file:
        mappable = file.read(2) == b"PK"  # a zip; torch wrote plain pickles before 1.6
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, a dictionary of tensors is expected")
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
