"""Downloads checkpoints of the Hugging Face hub through huggingface_hub, with its cache and variables."""

import os
from pathlib import Path

from snapcap.warmup.checkpoints.patterns import METADATA, PICKLES, SAFETENSORS, CheckpointError, matching
from snapcap.warmup.errors import os_error_text

_ADVICE = {
    "GatedRepoError": "access is gated; accept its terms on the hub and set HF_TOKEN",
    "RepositoryNotFoundError": "there is no such repository, or it is private; check the name, or set HF_TOKEN",
    "RevisionNotFoundError": "there is no such revision; write owner/name@branch, @tag or @commit",
    "HFValidationError": "that is neither a folder nor a hub id; hub ids look like owner/name",
}
_OFFLINE = "is not in the local cache and HF_HUB_OFFLINE is set; unset it, or give a folder"
_UNREACHABLE = "is not in the local cache and the hub cannot be reached; check the network, or give a folder"


def download_checkpoint(source: str) -> Path:
    """The folder in the hub's cache that holds ``owner/name`` or ``owner/name@revision``, downloaded if needed.

    Raises:
        CheckpointError: the repository is not there, not allowed, or out of reach.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second that a folder does not need

    repository, _, revision = source.partition("@")

    def snapshot(*patterns: str) -> Path:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(patterns)))

    try:
        folder = snapshot(*METADATA, *SAFETENSORS)
        # Pickles only where there is nothing else: many repositories hold both.
        if not matching((file.name for file in folder.glob("*")), SAFETENSORS):
            folder = snapshot(*METADATA, *PICKLES)
    except Exception as error:  # the library's own, its HTTP client's (which changed twice), the disk's
        raise CheckpointError(_sentence(error, source)) from error
    return folder


def _sentence(error: Exception, source: str) -> str:
    name = type(error).__name__
    if name in _ADVICE:
        return f"{source!r}: {_ADVICE[name]}"
    if name in ("LocalEntryNotFoundError", "IncompleteSnapshotError", "ConnectError", "ConnectTimeout"):
        offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
        return f"{source!r} {_OFFLINE if offline else _UNREACHABLE}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - as above

        where = error.filename or HF_HUB_CACHE
        return f"{source!r} cannot be downloaded to {where}: {os_error_text(error)} (HF_HOME)"
    return f"{source!r} cannot be downloaded ({name}: {' '.join(str(error).split())[:200]})"
