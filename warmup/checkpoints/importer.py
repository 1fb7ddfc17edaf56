"""Converts any checkpoint into a folder that the server can open: safetensors and tokenizer.json."""

import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.config import ModelConfig
from snapcap.models.errors import WeightsError
from snapcap.models.fields import ConfigError, FileError, is_there, json_or_empty, read_json
from snapcap.models.names import ties
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.processing.transform import ImageTransform, Normalisation
from snapcap.models.weights.listing import FORMATS, weight_names
from snapcap.warmup.checkpoints.local import ADAPTER, CheckpointError
from snapcap.warmup.checkpoints.source import resolve_checkpoint
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import sync
from snapcap.warmup.options import S3Options

if TYPE_CHECKING:
    from torch import Tensor

_COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
# Endings of tokenizer files that only transformers can read. Programs and weights have other endings.
_TOKENIZER_ENDINGS = (".json", ".txt", ".model", ".tiktoken", ".vocab", ".codes", ".bpe")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def import_checkpoint(
    source: str, destination: Path, s3: S3Options | None = None, force: bool = False
) -> list[Path]:
    """Write a checkpoint in the formats that the server reads. Tensors keep their names, dtypes and values.

    Pickled weights become ``model.safetensors``. transformers converts a slow tokenizer to ``tokenizer.json``,
    unless the server can read its files. No code of a checkpoint is run or copied. ``destination`` stays empty
    unless everything succeeds and the server can read the weights. Raises CheckpointError if the source cannot be
    found, read or served, or the destination must not be written.

    Args:
        source: as for ``resolve_checkpoint``. s3: the options of S3.
        destination: a folder, created if missing.
        force: allow a folder with files, and replace files of the same names.

    Returns:
        The files written, in ``destination``.
    """
    try:
        if not force and destination.is_dir() and any(destination.iterdir()):
            raise CheckpointError(f"{str(destination)!r} is not empty; give another folder, or --force to replace")
        with tempfile.TemporaryDirectory(prefix=".snapcap-import-", ignore_cleanup_errors=True) as cache:
            folder = resolve_checkpoint(source, Path(cache), s3 or S3Options())
            if destination.exists() and destination.samefile(folder):
                raise CheckpointError(f"{str(destination)!r} is the source itself; give another folder")
            return _write(folder, destination)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(
            f"{source!r} cannot be imported to {str(destination)!r}: {where}{os_error_text(error)}"
        ) from error


def _write(folder: Path, destination: Path) -> list[Path]:
    destination.mkdir(parents=True, exist_ok=True)
    # The staging folder is in the destination, so that files are moved within one file system.
    with tempfile.TemporaryDirectory(prefix=".snapcap-import-", dir=destination) as staging:
        _convert(folder, Path(staging))
        _refuse_leftovers(Path(staging), destination)
        return _move(Path(staging), destination)


def _convert(folder: Path, staging: Path) -> None:
    _refuse_links(folder)
    try:
        config = ModelConfig.from_folder(folder)
        ImageTransform.from_folder(folder, config.vision.image_size, family=config.vision.family)
        for name in _COPIED:
            if is_there(folder / name):
                shutil.copyfile(folder / name, staging / name)
        _convert_tokenizer(folder, staging)
        _convert_weights(folder, staging, config)
        _check_weights(staging, ModelConfig.from_folder(staging))  # a server will find every tensor
    except (ConfigError, WeightsError) as error:
        raise CheckpointError(str(error)) from error


def _refuse_links(folder: Path) -> None:
    """Raises CheckpointError for a link out of the checkpoint: an untrusted folder could make the importer copy a
    file of this user. Links of the hub's cache from a snapshot to its blobs are allowed."""
    own = folder.resolve()
    for path in folder.iterdir():
        target = Path(os.path.realpath(path))  # unlike Path.resolve, it does not raise for a link to itself
        if path.is_symlink() and not any(
            target.is_relative_to(each) for each in (own, own.parent.parent / "blobs")
        ):
            raise CheckpointError(f"{path} is a link out of the checkpoint, to {target}; put the file in its place")


def _convert_weights(folder: Path, staging: Path, config: ModelConfig) -> None:
    from safetensors import SafetensorError  # noqa: PLC0415 - torch
    from safetensors.torch import save_file  # noqa: PLC0415 - torch

    from snapcap.models.weights.read import read_tensors  # noqa: PLC0415 - torch

    names = weight_names(folder)
    # The server reads weights of any file name, but transformers recognises formats by their endings.
    if names[0] in FORMATS[0] and all(name.endswith(".safetensors") for name in names[1:]):
        for name in names:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, staging / name)
        return
    tensors = _without_aliases(read_tensors(folder), config)
    # transformers opens only files whose metadata names the framework.
    try:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors wraps the errors of the disk
        raise CheckpointError(f"{str(staging.parent)!r} cannot be written to: {error}") from error


def _check_weights(staging: Path, config: ModelConfig) -> None:
    """Raises WeightsError if the server would miss a tensor. Checks only names, shapes and dtypes."""
    import torch  # noqa: PLC0415

    from snapcap.models.weights.load import load_weights  # noqa: PLC0415 - torch

    load_weights(staging, config, Normalisation(), torch.device("meta"), torch.float32, "cpu")


def _without_aliases(tensors: "dict[str, Tensor]", config: ModelConfig) -> "dict[str, Tensor]":
    """Give every tensor its own memory, as safetensors requires. Tied tensors in one memory keep one name."""
    theirs = {ours: name for name, ours in config.names.canonical(tensors).items()}
    left_out: set[str] = set()
    for names in ties(tied_head=True) if config.decoder.tied_head else ():
        first, *others = [theirs[name] for name in names if name in theirs] or [""]
        left_out.update(name for name in others if tensors[name].data_ptr() == tensors[first].data_ptr())
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if name in left_out:
            continue
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = (tensor.clone() if storage in seen else tensor).contiguous()
        seen.add(storage)
    return separate


def _convert_tokenizer(folder: Path, staging: Path) -> None:
    for name in _TOKENIZER_FILES:
        if is_there(folder / name):
            shutil.copyfile(folder / name, staging / name)
    if (staging / "tokenizer.json").is_file():
        Tokenizer.from_folder(staging)
        return
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except FileError:
        raise
    except ConfigError:
        _convert_with_transformers(folder, staging)
    else:
        tokenizer.save(staging / "tokenizer.json")


def _convert_with_transformers(folder: Path, staging: Path) -> None:
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise CheckpointError(
            "only transformers can convert this tokenizer; run: pip install 'snapcap[transformers]'"
        ) from None
    with tempfile.TemporaryDirectory() as folder_for_transformers:
        copy, saved = (Path(folder_for_transformers) / name for name in ("tokenizer", "saved"))
        own_code = _copy_tokenizer(folder, copy)
        try:
            # This neither runs a checkpoint's code nor asks on the terminal whether it may.
            tokenizer = AutoTokenizer.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
            tokenizer.save_pretrained(saved)
        except Exception as error:  # a tokenizer of the hub may raise any error
            if own_code:
                raise CheckpointError(
                    "this tokenizer is Python code of the checkpoint, which is never run; give a checkpoint with a "
                    "tokenizer.json"
                ) from error
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"transformers cannot read the tokenizer: {reason}") from error
        for name in _TOKENIZER_FILES:
            if is_there(saved / name):
                shutil.copyfile(saved / name, staging / name)
    if not is_there(staging / "tokenizer.json"):
        raise CheckpointError("this tokenizer has no fast version, which the server needs")
    Tokenizer.from_folder(staging)


def _copy_tokenizer(folder: Path, copy: Path) -> bool:
    """Copy the tokenizer's files for transformers, without the fields that refer to a checkpoint's own code.
    Returns whether there were such fields."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.suffix in _TOKENIZER_ENDINGS and not path.is_dir() and is_there(path):
            shutil.copyfile(path, copy / path.name)
    config = read_json(folder / "config.json")
    # transformers knows no tokenizer of a vision-encoder-decoder, so the configuration is the decoder's, of which
    # transformers needs only the model type.
    owner = config["decoder"] if config["model_type"] == "vision-encoder-decoder" else config
    (copy / "config.json").write_text(json.dumps({"model_type": owner["model_type"]}))
    settings = json_or_empty(folder / "tokenizer_config.json")
    own_code = settings.pop("auto_map", None) is not None
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    return own_code


def _refuse_leftovers(staging: Path, destination: Path) -> None:
    """Raises CheckpointError if the destination has a file of another checkpoint that a server would read."""
    weights = weight_names(staging)[0]
    every = [name for names in FORMATS for name in names]
    for name in (*every[: every.index(weights)], *_COPIED, *_TOKENIZER_FILES, ADAPTER):
        if (destination / name).exists() and not (staging / name).exists():
            raise CheckpointError(
                f"{str(destination)!r} holds {name}, which the source does not have and a server would read; "
                "remove it, or give another folder"
            )


def _move(staging: Path, destination: Path) -> list[Path]:
    """Moves the files into the destination once all are synced, so that a power cut leaves no incomplete file."""
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    mode = _mode_of_new_files(staging)
    for file in files:
        file.chmod(mode)  # safetensors makes files that only their owner may read
        sync(file)
    written = [destination / file.relative_to(staging) for file in files]
    for file, place in zip(files, written, strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
    for folder in {destination, *(place.parent for place in written)}:
        sync(folder)
    return written


def _mode_of_new_files(folder: Path) -> int:
    """Returns the mode of a new file, by creating one: reading the umask would mean setting it."""
    probe = folder / ".mode"
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode
