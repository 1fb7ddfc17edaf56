"""Downloads checkpoints of the Hugging Face hub through huggingface_hub, with its cache and variables."""

import os
import re
from collections.abc import Iterable
from glob import escape
from pathlib import Path

from snapcap.models.errors import WeightsError
from snapcap.models.fields import ConfigError
from snapcap.models.weights.listing import FORMATS, wanted_names, weight_files
from snapcap.warmup.cache_folder import is_usable, user_cache
from snapcap.warmup.checkpoints.local import METADATA, OUTAGE_S, CheckpointError, metadata_among, report_unasked
from snapcap.warmup.errors import first_line, os_error_text, without_passwords
from snapcap.warmup.machine.worker import within

_ADVICE = {
    "GatedRepoError": "access is gated; accept its terms on the hub and set HF_TOKEN",
    "RepositoryNotFoundError": "there is no such repository, or it is private; check the name, or set HF_TOKEN",
    "RevisionNotFoundError": "there is no such revision; write owner/name@branch, @tag or @commit",
    "HFValidationError": "that is neither a folder nor a hub id; hub ids look like owner/name",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_UNREACHABLE = "check the network and HF_ENDPOINT, or give a folder"


def download_checkpoint(source: str) -> Path:
    """Returns the folder in the hub's cache for ``owner/name`` or ``owner/name@revision``; downloads it if needed.

    If the hub does not answer, a complete checkpoint of the cache is used. Raises CheckpointError if the repository
    does not exist, or access is denied, or the hub cannot be reached."""
    known = _whole_folder(source)
    if known is not None:
        if _offline_variable() or (pinned_commit(source) is not None and _is_described(known)):
            return known
        try:
            commit, names = within(OUTAGE_S, lambda: _revision(source, OUTAGE_S), "snapcap-source")
        except (CheckpointError, TimeoutError) as error:
            report_unasked(source, error)
            return known
        if commit == known.name and all((known / name).is_file() for name in metadata_among(names)):
            return known
    try:
        return _snapshot(source)
    except (WeightsError, ConfigError) as error:
        raise CheckpointError(f"{source!r}: {error}") from error
    except Exception as error:  # any error of the library, its HTTP client (which changed twice) or the disk
        raise CheckpointError(_sentence(error, source)) from error


def _snapshot(source: str, *, local_files_only: bool = False) -> Path:
    """Returns the folder of a snapshot, which huggingface_hub downloads or has cached. Raises the library's
    errors."""
    _use_home()
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second that a folder does not need

    repository, _, revision = source.partition("@")

    def snapshot(revision: str | None, names: Iterable[str]) -> Path:
        patterns = [*METADATA, *map(escape, names)]
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=patterns, local_files_only=local_files_only
            )
        )

    folder = snapshot(revision or None, FORMATS[0])
    # Pickles only where there is nothing else: many repositories hold both.
    if not wanted_names(folder):
        folder = snapshot(commit_of(folder), FORMATS[1])
    weights = wanted_names(folder)
    return snapshot(commit_of(folder), weights) if len(weights) > 1 else folder


def _whole_folder(source: str) -> Path | None:
    """Returns the folder in the hub's cache if the library finds all its files there, else None."""
    try:
        folder = _snapshot(source, local_files_only=True)
        whole = (folder / "config.json").is_file() and bool(weight_files(folder))
    except Exception:  # any error of the library, its HTTP client or the disk; the download will report it
        return None
    return folder if whole else None


def _is_described(folder: Path) -> bool:
    """Returns whether a folder has files of a tokenizer and of an image processor.

    Another program may have put only the weights and config.json into the hub's cache, and a download may have been
    cut. A start would then fail, or use the default image processor without a warning."""
    return any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")) and any(
        (folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")
    )


def cached_folder(source: str) -> Path | None:
    """Returns the folder in the hub's cache for a source, without asking the hub; None if there is none."""
    _use_home()
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - only sources on the hub need it

    repository, _, revision = source.partition("@")
    folder = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        commit = pinned_commit(source) or (folder / "refs" / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        return None
    return folder / "snapshots" / commit if _COMMIT.fullmatch(commit) else None


def pinned_commit(source: str) -> str | None:
    """Returns the commit that a source contains (``owner/name@<commit>``), or None. A commit never changes."""
    revision = source.partition("@")[2]
    return revision if _COMMIT.fullmatch(revision) else None


def current_commit(source: str, seconds: float) -> str:
    """Asks the hub for the present commit of a branch, a tag or the default branch. Raises CheckpointError if the
    hub does not answer within ``seconds``."""
    return _revision(source, seconds)[0]


def _revision(source: str, seconds: float) -> tuple[str, list[str]]:
    """Asks the hub for the commit of a source and the names of its files. Raises as ``current_commit`` does."""
    _use_home()
    from huggingface_hub import HfApi  # noqa: PLC0415 - only sources on the hub need it

    repository, _, revision = source.partition("@")
    try:
        found = HfApi().model_info(repository, revision=revision or None, timeout=seconds)
    except Exception as error:  # any error of the library, its HTTP client or the disk
        raise CheckpointError(_sentence(error, source)) from error
    if found.sha is None or not _COMMIT.fullmatch(found.sha):
        raise CheckpointError(f"{source!r}: the hub names no commit")
    return found.sha, [file.rfilename for file in found.siblings or ()]


def commit_of(folder: Path) -> str | None:
    """Returns the commit of a folder in the hub's cache, or None if the folder is not in it."""
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None


def _use_home() -> None:
    """Set a writable cache folder for the library, also without a home folder. Call this before importing it."""
    if any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")):
        return
    if not is_usable(Path(os.path.expanduser("~/.cache/huggingface"))):  # expanduser never raises
        os.environ["HF_HOME"] = str(user_cache() / "huggingface")


def _offline_variable() -> str:
    """Returns the name of the variable that sets the library offline; "" if none is set."""
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return name if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") else ""


def _sentence(error: Exception, source: str) -> str:
    name = type(error).__name__
    if name in _ADVICE:
        return f"{source!r}: {_ADVICE[name]}"
    if name in ("LocalEntryNotFoundError", "IncompleteSnapshotError", "ConnectError", "ConnectTimeout"):
        if offline := _offline_variable():
            return f"{source!r} is not in the local cache and {offline} is set; unset it, or give a folder"
        from huggingface_hub.constants import ENDPOINT  # noqa: PLC0415 - only sources on the hub need it

        cause = error.__cause__ or error  # the library's own sentence leaves the HTTP client's error out
        said = f"{type(cause).__name__}: {without_passwords(first_line(cause))[:200]}"
        endpoint = without_passwords(ENDPOINT)
        return f"{source!r} is not in the local cache and {endpoint} cannot be reached ({said}); {_UNREACHABLE}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - only sources on the hub need it

        where = error.filename or HF_HUB_CACHE
        return f"{source!r} cannot be downloaded to {where}: {os_error_text(error)} (HF_HOME)"
    return f"{source!r} cannot be downloaded ({name}: {without_passwords(' '.join(str(error).split()))[:200]})"
