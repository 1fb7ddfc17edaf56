"""Downloads a checkpoint and reads everything except its weights, before torch is imported. Imports no torch.

Rendering a chat template takes a process and half a second. So the tokens that the template puts around a message
are recorded in the artifact folder, under the name of the checkpoint's folder, with a digest of the checkpoint's
files, snapcap's code and the versions of libraries. If any of them changes, the next start makes a new record.
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.config import IMAGE_TOKENS, ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.fields import is_there, read_bytes
from snapcap.models.json_object import from_json, to_json
from snapcap.models.text import ChatIds, ImageMarkup
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import canonical_json
from snapcap.warmup.artifacts.store import CHATS, StoreError, record_name
from snapcap.warmup.checkpoints.local import TEXT_FILES, CheckpointError
from snapcap.warmup.machine.installation import installed_version, package_folder
from snapcap.warmup.options import StartOptions

if TYPE_CHECKING:
    from snapcap.models.processing.tokenizer import Tokenizer
    from snapcap.models.processing.transform import ImageTransform


@dataclass(frozen=True)
class Checkpoint:
    """Holds a checkpoint on the local disk: everything except its weights. The tokenizer is read on first use.

    ``bring``: if ``folder`` lacks the weights, because the start has prepared weights, a function that downloads
    the whole checkpoint and returns its folder."""

    name: str
    folder: Path
    config: ModelConfig
    transform: "ImageTransform"
    bring: Callable[[], Path] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, options: StartOptions, folder: Path, config: ModelConfig | None = None) -> "Checkpoint":
        """Reads the checkpoint of these options from ``folder``. ``config``: the configuration, if it is read
        already. Raises ConfigError if its files cannot be used."""
        from snapcap.models.processing.transform import ImageTransform  # noqa: PLC0415  imports numpy

        config = config or config_of(options, folder)
        vision = config.vision
        transform = ImageTransform.from_folder(folder, vision.image_size, options.images.max_pixels, vision.family)
        return cls(options.model.source, folder, config, transform)

    def whole(self) -> "Checkpoint":
        """Returns the checkpoint with its weights, which are downloaded if missing. Raises CheckpointError if the
        download fails."""
        return self if self.bring is None else replace(self, folder=self.bring(), bring=None)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer, read once. Raises ConfigError if its files cannot be used."""
        from snapcap.models.processing.tokenizer import Tokenizer  # noqa: PLC0415  a native library, which the device does not need

        return Tokenizer.from_folder(self.folder, self.config.chat)


def resolved(options: StartOptions) -> Path:
    """Downloads the checkpoint if needed, and returns its folder. Raises CheckpointError."""
    from snapcap.warmup.checkpoints.source import resolve_checkpoint  # noqa: PLC0415  the HTTP process has the folder

    return resolve_checkpoint(options.model.source, options.model.cache_dir, options.s3)


def downloaded(options: StartOptions, identity: Mapping[str, str]) -> Path:
    """Downloads the whole checkpoint and returns its folder. ``identity``: the revision whose configuration the
    start uses already. Raises CheckpointError if the download fails, or has another revision."""
    from snapcap.warmup.checkpoints.source import downloaded_identity  # noqa: PLC0415  few starts need it

    folder = resolved(options)
    if dict(downloaded_identity(options.model.source, folder)) != dict(identity):
        raise CheckpointError(f"{options.model.source!r} was changed while this server started; start it again")
    return folder


def read_checkpoint(options: StartOptions) -> Checkpoint:
    """Downloads the checkpoint if needed, and reads everything except the weights. Raises CheckpointError or
    ConfigError if the source or its files cannot be used."""
    return Checkpoint.of(options, resolved(options))


_logger = logging.getLogger("snapcap.start")
_MOST_BYTES = 256 * 1024
_SOURCES = ("chat.py", "chat_render.py", "tokenizer.py")
_LIBRARIES = ("jinja2", "tokenizers")


@dataclass(frozen=True)
class _Record:
    """Holds the tokens of a chat template. ``digest``: SHA-256 of everything that decides the tokens."""

    digest: str
    chat: ChatIds


def config_of(options: StartOptions, folder: Path) -> ModelConfig:
    """Returns the configuration of the checkpoint in ``folder``. Raises as ``read_config`` does."""
    model, images = options.model, options.images
    return read_config(folder, options.store_folder, model.text_tokens, images.max_image_tokens)


def read_config(
    folder: Path, store_folder: Path, text_tokens: int = 0, image_tokens: int = IMAGE_TOKENS
) -> ModelConfig:
    """Returns the configuration of a checkpoint folder, with the recorded tokens of its chat template, if it has
    one. Takes the arguments and raises the errors of ``ModelConfig.from_folder`` and ``with_text_tokens``."""
    config = ModelConfig.from_folder(folder, partial(_recorded, store_folder), image_tokens)
    return config.with_text_tokens(text_tokens)


def _recorded(store_folder: Path, folder: Path, markup: ImageMarkup) -> ChatIds:
    """Returns the recorded chat tokens of a checkpoint. Without a valid record, reads the template and tokenizer
    and records the result if the folder can be written."""
    digest, name = _digest(folder, markup), record_name(CHATS, folder)
    store = None
    try:
        store = FolderStore.open(store_folder)
        stored = store.read(name, _MOST_BYTES)
        if stored is not None:
            found = from_json(_Record, stored.data)
            chat = found.chat
            ids = chat.start_id, *chat.prefix, *chat.opening_ids, *chat.closing_ids
            if found.digest == digest and min(ids) >= 0:
                return chat
    except StoreError as error:
        _logger.warning("records of chat templates cannot be used", extra={"fields": {"reason": str(error)}})
    except ValueError:  # a record of another version
        pass
    from snapcap.models.processing.chat import read_chat  # noqa: PLC0415  libraries of text, which a record spares

    chat = read_chat(folder, markup)
    if store is not None:
        with contextlib.suppress(StoreError):  # without a record, the next start reads the template again
            store.keep(name, to_json(_Record(digest, chat)).encode())
    return chat


def _digest(folder: Path, markup: ImageMarkup) -> str:
    """Returns the SHA-256, in hex, of everything that decides the recorded tokens."""
    versions = {library: installed_version(library) for library in _LIBRARIES}
    digest = hashlib.sha256(canonical_json([asdict(markup), versions]))
    ours = package_folder("snapcap.models") / "processing"
    files = [ours / name for name in _SOURCES] + [folder / name for name in ("config.json", *TEXT_FILES)]
    for file in files:
        if not file.is_dir() and is_there(file):  # only regular files: reading a FIFO would never end
            digest.update(f"{file.name} {hashlib.sha256(read_bytes(file)).hexdigest()}\n".encode())
    return digest.hexdigest()
