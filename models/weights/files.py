"""Reads the tensors of a checkpoint folder, from safetensors or ``.bin`` files, whole or sharded."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.weights.listing import WeightsError, weight_files, weight_places

_POINTER = b"version https://git-lfs"  # beginning of the pointer that Git LFS leaves in place of a large file


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns every tensor of the checkpoint by name, memory-mapped on the CPU, in the dtype of the file.

    ``.bin`` files are pickles. They are read with ``weights_only=True``, which runs no code. If several files hold
    a tensor, the file that the index names is read; if that file lacks it, another that has it.

    Raises:
        WeightsError: a file cannot be read, or two files hold a tensor and the index names neither.
    """
    tensors: dict[str, Tensor] = {}
    elsewhere: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    places = weight_places(folder)
    for path in weight_files(folder):
        file = path.relative_to(folder).as_posix()
        for name, tensor in _read(path).items():
            if places.get(name, file) != file:
                elsewhere[name] = tensor
                continue
            if name in files:
                raise WeightsError(
                    f"{files[name]} and {file} both hold {name!r}, and the index names neither for it"
                )
            tensors[name], files[name] = tensor, file
    return {**elsewhere, **tensors}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return _tensors(path)
    except pickle.UnpicklingError as error:  # torch's own message suggests loading the file unsafely
        raise WeightsError(
            f"{path.name} is refused: it is damaged, or holds more than tensors, which could run code; "
            "save the model as safetensors"
        ) from error
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror or _first_line(error)}: {path}") from error
    except (ValueError, RuntimeError, EOFError) as error:
        raise WeightsError(f"{path.name} cannot be read: {_first_line(error)}") from error
    except Exception as error:  # safetensors raises its own type, a direct subclass of Exception
        raise WeightsError(f"{path.name} is damaged: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's text. torch's text about a bad pickle fills a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tensors(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        head = file.read(len(_POINTER))
    if head == _POINTER:
        raise ValueError("it is a Git LFS pointer to the file; run git lfs pull")
    # A safetensors file has any name: its length field is followed by a JSON header.
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        from safetensors.torch import load_file  # noqa: PLC0415 - only safetensors files need it

        return load_file(path)
    mappable = head[:2] == b"PK"  # a zip; torch wrote plain pickles before 1.6
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, a dictionary of tensors is expected")
    tensors = {
        name: tensor for name, tensor in state.items() if isinstance(name, str) and isinstance(tensor, Tensor)
    }
    if not tensors:
        raise ValueError("it holds no tensors by name; save the model's state_dict alone")
    return tensors
