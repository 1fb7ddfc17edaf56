"""Saves and restores what torch.compile keeps of its work, as the files of a `jit` artifact set.

    jit/cache.bin        torch's own cache artifacts: graphs by key. A pickle, so loading it runs code
    jit/libraries.zip    the shared libraries compiled for them, which torch leaves out; without them a CPU start
                         would call the C++ compiler for every kernel again

Both are used only as the bytes whose digest the manifest names.
"""

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.scratch import scratch_folder
from snapcap.warmup.store.blobs import ChangedError

if TYPE_CHECKING:
    from torch.compiler._cache import CacheInfo

    from snapcap.warmup.plan.artifacts import Artifacts

PAYLOAD = "jit/cache.bin"
LIBRARIES = "jit/libraries.zip"
_LIBRARY = ".so"


class RestoreError(RuntimeError):
    """A set that was verified when it was fetched, and cannot be used now; one line that says why."""


@dataclass
class CompileCache:
    """The cache folder of one start. Nothing is in it but what the start puts there: neither an earlier start nor
    another program makes this one look warm."""

    folder: Path
    _restored: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    @contextlib.contextmanager
    def private(cls, more: Mapping[str, str]) -> Iterator["CompileCache"]:
        """A new folder for Inductor and Triton, until the block ends. To be entered before torch compiles.

        Libraries that are loaded by then stay loaded. ``more``: other variables of the compiler, for as long.
        """
        with scratch_folder("snapcap-jit-") as folder:
            variables = {
                "TORCHINDUCTOR_CACHE_DIR": str(folder),
                "TRITON_CACHE_DIR": str(folder / "triton"),
                "TORCH_WARM_POOL": "0",  # no compiler processes before there is something to compile
                **more,
            }
            before = {variable: os.environ.get(variable) for variable in variables}
            os.environ.update(variables)
            try:
                yield cls(folder)
            finally:
                for variable, value in before.items():
                    os.environ.pop(variable)
                    if value is not None:
                        os.environ[variable] = value

    def restore(self, artifacts: "Artifacts") -> int:
        """Give torch what a set holds; returns the number of cached graphs and parts of graphs.

        Raises:
            RestoreError: a file is missing or has changed since it was fetched, or torch cannot read it.
        """
        from torch.compiler import load_cache_artifacts  # noqa: PLC0415

        payload, libraries = (_verified(artifacts, name) for name in (PAYLOAD, LIBRARIES))
        with zipfile.ZipFile(io.BytesIO(libraries)) as archive:
            archive.extractall(self.folder)
        info = load_cache_artifacts(payload)
        if info is None:
            raise RestoreError(f"torch cannot read {PAYLOAD}; the log has the cause")
        self._restored = _names(info)
        return len(self._restored)

    def save(self) -> dict[str, Path]:
        """Write what this start's graphs need to files of the cache folder, by entry name.

        Empty where torch has cached nothing that was not restored. Graphs that were restored and not compiled in
        this process are left out, so every bucket must have run.
        """
        from torch.compiler import save_cache_artifacts  # noqa: PLC0415

        saved = save_cache_artifacts()
        if saved is None or _names(saved[1]) <= self._restored:
            return {}
        files = {name: self.folder / Path(name).name for name in (PAYLOAD, LIBRARIES)}
        files[PAYLOAD].write_bytes(saved[0])
        _archive(self.folder, files[LIBRARIES])
        return files


def _names(info: "CacheInfo") -> set[tuple[str, str]]:
    artifacts: Mapping[str, list[str]] = info.artifacts
    return {(kind, key) for kind, keys in artifacts.items() for key in keys}


def _verified(artifacts: "Artifacts", name: str) -> bytes:
    """The bytes of an entry, hashed after they were read: a file could have changed since it was fetched."""
    file = artifacts.fetched.entries.get(name)
    if file is None:
        raise RestoreError(f"the artifact set has no {name}")
    try:
        return file.read()
    except ChangedError:
        raise RestoreError(f"{name} has changed since it was fetched") from None
    except OSError as error:
        raise RestoreError(f"{name} cannot be read: {error.strerror}") from error


def _archive(folder: Path, path: Path) -> None:
    """All libraries below a folder; equal contents give equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for library in sorted(folder.rglob(f"*{_LIBRARY}")):
            info = zipfile.ZipInfo(str(library.relative_to(folder)), date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, library.read_bytes())
