"""Lists the files of a checkpoint that hold its weights: one file, or the files of an index. Imports no torch."""

import codecs
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from snapcap.models.errors import WeightsError
from snapcap.models.fields import is_there, read_bytes
from snapcap.models.json_object import load_object

# A single file and an index of several files, in transformers' order: the first that exists is read.
FORMATS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
MOST_INDEX_BYTES = 16 * 1024 * 1024
MOST_FILES = 1024  # greatest number of files in an index
_MOST_NAME = 255  # greatest length in bytes of a folder's or file's name
_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_FOREIGN = (".h5", ".msgpack", ".gguf", ".onnx", ".tflite", ".mlpackage", ".npz", ".engine")
_TRAINING = ("training_args.", "optimizer.", "scheduler.", "rng_state", "scaler.")  # files beside weights
_PART = re.compile(r"-\d+-of-\d+\.\w+$")


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold the weights: safetensors before ``.bin``, a single file before an index.

    Raises:
        WeightsError: there are none, or an index is invalid or names a file that does not exist.
        FileError: the system does not allow a file to be read.
    """
    return [folder / name for name in weight_names(folder) if name not in _INDEXES]


def weight_places(folder: Path) -> Mapping[str, str]:
    """Returns the file of each tensor, by name, from an index. Empty if one file holds all tensors. Raises like
    ``weight_files``."""
    names = weight_names(folder)
    return index_places(_index_bytes(folder / names[0]), names[0]) if names[0] in _INDEXES else {}


def weight_names(folder: Path) -> list[str]:
    """Returns the names of the files of ``weight_files``. An index goes before the files that it names. Raises
    like ``weight_files``."""
    names = wanted_names(folder)
    if not names:
        raise WeightsError(_nothing(folder))
    for name in names:
        if not is_there(folder / name):
            raise WeightsError(f"{names[0]} names {name!r}, which is not in {folder.name}/")
    return names


def wanted_names(folder: Path) -> list[str]:
    """Returns ``choose_weights`` for a folder. Files that an index names may be missing. Raises like
    ``choose_weights``."""
    return choose_weights(lambda name: is_there(folder / name), lambda index: _index_bytes(folder / index))


def choose_weights(has: Callable[[str], bool], read: Callable[[str], bytes]) -> list[str]:
    """Returns the names of the files that hold a checkpoint's weights. An index goes before the files that it
    names.

    The checkpoint may be in a folder or elsewhere. The list is empty if it has no weights.

    Args:
        has: returns whether the checkpoint has a file of that name.
        read: returns the content of an index; ``MOST_INDEX_BYTES`` + 1 bytes are enough.

    Raises:
        WeightsError: the index is invalid, or holds a name that cannot be a file of the checkpoint.
    """
    for single, index in FORMATS:
        if has(single):
            return [single]
        if has(index):
            return [index, *sorted(set(index_places(read(index), index).values()))]
    return []


def index_places(content: bytes, index: str) -> dict[str, str]:
    """Returns the file of each tensor, by name, from the content of an index. Raises WeightsError if the index is
    invalid, or holds a name that cannot be a file of the checkpoint."""
    if len(content) > MOST_INDEX_BYTES:
        raise WeightsError(f"{index} has more than {MOST_INDEX_BYTES} bytes")
    try:
        places = load_object(content.removeprefix(codecs.BOM_UTF8)).get("weight_map")
    except ValueError as error:
        raise WeightsError(f"{index} is not a weight index: it {error}") from None
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise WeightsError(f"{index} is not a weight index: it needs a 'weight_map' of a file for each tensor")
    files = sorted(set(places.values()))
    if len(files) > MOST_FILES:
        raise WeightsError(f"{index} names {len(files)} files; at most {MOST_FILES} are read")
    for file in files:
        if not is_safe_name(file):
            raise WeightsError(f"{index} names {file[:_MOST_NAME]!r}, which is no name of a file in the checkpoint")
    return places


def is_safe_name(name: str) -> bool:
    """Returns whether a name is a path inside a folder, at most four levels deep, and neither hidden nor a Python
    program."""
    parts = name.split("/")
    return (
        name.isprintable()
        and "\\" not in name
        and len(parts) <= 4
        and all(part and not part.startswith(".") and len(part.encode()) <= _MOST_NAME for part in parts)
        and PurePosixPath(name).suffix.lower() != ".py"
    )


_INDEXES = tuple(index for _, index in FORMATS)


def _index_bytes(path: Path) -> bytes:
    return read_bytes(path, MOST_INDEX_BYTES + 1)


def _nothing(folder: Path) -> str:
    """Describes a folder without weights that are read, and what to do."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for ending in _TENSORS + _FOREIGN for name in names if name.endswith(ending)]
    name = next((name for name in others if not name.startswith(_TRAINING)), "")
    single, index = FORMATS[0 if name.endswith(".safetensors") else 1]
    if not name:
        advice = "download or copy them again"
    elif name.endswith(_FOREIGN):
        advice = f"{name!r}, which is there, is not read; give the model's PyTorch weights"
    elif _PART.search(name):
        advice = f"{name!r} is a part of them, and {index} is missing; download or copy it again"
    else:
        advice = f"{name!r}, which is there, is not read; if it holds the whole model, rename it to {single}"
    return f"no weights in {folder}: model.safetensors or pytorch_model.bin is expected; {advice}"
