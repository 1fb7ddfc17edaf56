"""Converts any checkpoint into a folder that the server opens as it is: safetensors and tokenizer.json."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.config import ConfigError, ModelConfig
from snapcap.models.fields import read_json
from snapcap.models.names import HEADS
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.weights.listing import WeightsError, weight_files
from snapcap.warmup.checkpoints.patterns import SAFETENSORS, CheckpointError, matching
from snapcap.warmup.checkpoints.resolve import resolve_checkpoint
from snapcap.warmup.errors import os_error_text
from snapcap.warmup.machine.files import sync
from snapcap.warmup.options import S3Options

if TYPE_CHECKING:
    from torch import Tensor

_COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def import_checkpoint(
    source: str, destination: Path, s3: S3Options | None = None, force: bool = False
) -> list[Path]:
    """Write a checkpoint as the server reads it; tensors keep their names, dtypes and values.

    Pickled weights become ``model.safetensors``, and slow tokenizers ``tokenizer.json``: with transformers, but for
    those that the server reads as they are. Nothing appears in ``destination`` unless everything succeeded.

    Args:
        source: whatever ``resolve_checkpoint`` takes; ``s3`` says where S3 is.
        destination: a folder, made if it is not there.
        force: write into a folder that holds files already, replacing those of the same name.

    Returns:
        The files written, in ``destination``.

    Raises:
        CheckpointError: the source cannot be had, read or served, or the destination must not be written.
    """
    if not force and destination.is_dir() and any(destination.iterdir()):
        raise CheckpointError(f"{str(destination)!r} is not empty; give another folder, or --force to replace")
    with tempfile.TemporaryDirectory(prefix="snapcap-import-", ignore_cleanup_errors=True) as cache:
        folder = resolve_checkpoint(source, Path(cache), s3 or S3Options())
        if destination.exists() and destination.samefile(folder):
            raise CheckpointError(f"{str(destination)!r} is the source itself; give another folder")
        return _write(folder, destination)


def _write(folder: Path, destination: Path) -> list[Path]:
    try:
        destination.mkdir(parents=True, exist_ok=True)
        # Inside the destination, so that the files move within one file system.
        with tempfile.TemporaryDirectory(prefix=".snapcap-import-", dir=destination) as staging:
            _convert(folder, Path(staging))
            return _move(Path(staging), destination)
    except OSError as error:
        raise CheckpointError(
            f"{str(folder)!r} cannot be imported to {str(destination)!r}: {os_error_text(error)}"
        ) from error


def _convert(folder: Path, staging: Path) -> None:
    try:
        config = ModelConfig.from_folder(folder)
        ImageTransform.from_folder(folder, config.vision.image_size, family=config.vision.family)
        for name in _COPIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, staging / name)
        _convert_tokenizer(folder, staging)
        _convert_weights(folder, staging, config)
        ModelConfig.from_folder(staging)  # what a server needs is there
    except (ConfigError, WeightsError) as error:
        raise CheckpointError(str(error)) from error


def _convert_weights(folder: Path, staging: Path, config: ModelConfig) -> None:
    from safetensors import SafetensorError  # noqa: PLC0415 - torch
    from safetensors.torch import save_file  # noqa: PLC0415 - torch

    from snapcap.models.weights.files import read_tensors  # noqa: PLC0415 - torch

    files = weight_files(folder)
    if files[0].suffix == ".safetensors":
        shards = matching((path.name for path in folder.iterdir()), SAFETENSORS[1:]) if len(files) > 1 else []
        for name in shards or [files[0].name]:
            shutil.copyfile(folder / name, staging / name)
        return
    tensors = _without_aliases(read_tensors(folder), config)
    # transformers opens only files that say which framework wrote them.
    try:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # what the disk says comes as its text
        raise CheckpointError(f"{str(staging.parent)!r} cannot be written to: {error}") from error


def _without_aliases(tensors: "dict[str, Tensor]", config: ModelConfig) -> "dict[str, Tensor]":
    """Give every tensor its own memory, which safetensors asks for; a head tied to the embedding is left out."""
    known = config.names.canonical(tensors)
    heads = {name for name, ours in known.items() if ours in HEADS}
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in sorted(tensors, key=lambda name: name in heads):  # after the embedding it may be
        tensor = tensors[name]
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            if config.decoder.tied_head and name in heads:
                continue
            tensor = tensor.clone()
        seen.add(storage)
        separate[name] = tensor.contiguous()
    return separate


def _convert_tokenizer(folder: Path, staging: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, staging / name)
    if (staging / "tokenizer.json").is_file():
        Tokenizer.from_folder(staging)
        return
    try:
        tokenizer = Tokenizer.from_folder(folder)
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
        copy = Path(folder_for_transformers) / "tokenizer"
        shutil.copytree(folder, copy, ignore=_is_no_tokenizer_file)
        # The tokenizer is the decoder's; transformers does not look for one of a vision-encoder-decoder.
        config = read_json(folder / "config.json")
        (copy / "config.json").write_text(json.dumps(config.get("decoder", config)))
        try:
            AutoTokenizer.from_pretrained(copy, local_files_only=True).save_pretrained(staging)
        except Exception as error:  # whatever a tokenizer of the hub may raise
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"transformers cannot read the tokenizer: {reason}") from error
    if not (staging / "tokenizer.json").is_file():
        raise CheckpointError("this tokenizer has no fast version, which the server needs")
    Tokenizer.from_folder(staging)


def _is_no_tokenizer_file(_folder: str, names: list[str]) -> list[str]:
    return [n for n in names if n.endswith((".safetensors", ".bin", ".h5", ".msgpack", ".pt")) or n.startswith(".")]


def _move(staging: Path, destination: Path) -> list[Path]:
    """Into their places, once all of them are on the disk: a power cut leaves no file that only looks whole."""
    for file in staging.iterdir():
        sync(file)
    written = []
    for file in sorted(staging.iterdir()):
        os.replace(file, destination / file.name)
        written.append(destination / file.name)
    sync(destination)
    return written
