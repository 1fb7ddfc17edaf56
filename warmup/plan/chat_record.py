"""Keeps what a checkpoint's chat template makes of a message, which takes a process and half a second to find out.

A record is in the artifact folder, under the name of the checkpoint's folder, with the digest of all that it was
made of: a file that has changed, or a version of ours or of a library, makes a new one. No torch.
"""

import contextlib
import hashlib
import json
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from snapcap.models.config import ModelConfig
from snapcap.models.fields import is_there, is_whole, read_bytes
from snapcap.models.text import ChatIds, ImageMarkup
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import canonical_json
from snapcap.warmup.artifacts.store import CHATS, StoreError
from snapcap.warmup.machine.installation import installed_version, package_folder

_logger = logging.getLogger("snapcap.start")
_MOST_BYTES = 256 * 1024
_SOURCES = ("chat.py", "chat_render.py", "tokenizer.py")
# Files of a checkpoint from which its chat template and tokenizer are read.
_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_LIBRARIES = ("jinja2", "tokenizers")
_NUMBERS, _TEXTS = ("prefix", "opening_ids", "closing_ids"), ("lead", "trail")


def read_config(folder: Path, store_folder: Path) -> ModelConfig:
    """The configuration of a checkpoint folder, with what is recorded of its chat template, if it has one.

    Raises:
        ConfigError, FileNotFoundError: as ``ModelConfig.from_folder``.
    """
    return ModelConfig.from_folder(folder, partial(_recorded, store_folder))


def _recorded(store_folder: Path, folder: Path, markup: ImageMarkup) -> ChatIds:
    """Returns the recorded chat tokens of a checkpoint. Without a valid record, reads the template and tokenizer
    and records the result if the folder can be written."""
    digest, name = _digest(folder, markup), _name(folder)
    store = None
    try:
        store = FolderStore.open(store_folder)
        stored = store.read(name, _MOST_BYTES)
        found = None if stored is None else _parsed(stored.data, digest)
    except StoreError as error:
        _logger.warning("what is recorded of chat templates is not used", extra={"fields": {"reason": str(error)}})
        found = None
    if found is not None:
        return found
    from snapcap.models.processing.chat import read_chat  # noqa: PLC0415  libraries of text, which a record spares

    chat = read_chat(folder, markup)
    if store is not None:
        with contextlib.suppress(StoreError):  # a folder that cannot be written costs the next start the same
            store.keep(name, json.dumps({"digest": digest, "chat": asdict(chat)}).encode())
    return chat


def _name(folder: Path) -> str:
    """Returns the record's object name, made of the folder's path, so that a new record replaces the old one."""
    return f"{CHATS}/{hashlib.sha256(str(folder.resolve()).encode(errors='surrogateescape')).hexdigest()}.json"


def _digest(folder: Path, markup: ImageMarkup) -> str:
    """SHA-256, in hex, of everything that decides what is recorded."""
    versions = {library: installed_version(library) for library in _LIBRARIES}
    digest = hashlib.sha256(canonical_json([asdict(markup), versions]))
    ours = package_folder("snapcap.models") / "processing"
    for file in (*(ours / source for source in _SOURCES), *(folder / name for name in _FILES)):
        if is_there(file):  # anything but a file is not read for a template either, and a pipe would never end
            digest.update(f"{file.name} {hashlib.sha256(read_bytes(file)).hexdigest()}\n".encode())
    return digest.hexdigest()


def _parsed(data: bytes, digest: str) -> ChatIds | None:
    """Parses a record. Returns None if it is of other files or has another form."""
    try:
        value: dict[str, Any] = json.loads(data)
        if value["digest"] != digest:
            return None
        chat = value["chat"]
        numbers = {name: tuple(chat[name]) for name in _NUMBERS}
        found = ChatIds(**{**chat, **numbers})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = (*(each for ids in numbers.values() for each in ids), found.start_id)
    texts = (getattr(found, name) for name in _TEXTS)
    typed = all(is_whole(each) and each >= 0 for each in whole) and all(isinstance(text, str) for text in texts)
    return found if typed and isinstance(found.strips, bool) else None
