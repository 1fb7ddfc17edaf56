"""Keeps a build's packages, each beside its record: what it is, and that it has passed its self-check."""

import json
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import Blob
from snapcap.warmup.machine.files import make_folder, open_regular
from snapcap.warmup.runtime.aoti.packages import InputSpecs
from snapcap.warmup.store.blobs import VerifiedFile

_RECORD_BYTES = 1024 * 1024


@dataclass(frozen=True)
class BuildFolder:
    """Keeps the packages and records of one artifact key's build, so that an interrupted build resumes."""

    path: Path

    def make(self) -> None:
        """Raises OSError."""
        make_folder(self.path)

    def record(self, entry: str, specs: InputSpecs, checked: Blob, library: str = "") -> VerifiedFile:
        """Record that a package passed its check, with the digest and size that it had then. A package without a
        record counts as not built.

        Args:
            library: the digest of the CPU library on which the package passed too; "" for none.

        Raises:
            OSError: the record cannot be written.
        """
        path = self.path / entry
        temporary = path.with_suffix(".json.part")
        record = {"digest": checked.digest, "size": checked.size, "signature": specs, "library": library}
        temporary.write_text(json.dumps(record))
        temporary.replace(path.with_suffix(".json"))
        return VerifiedFile(path, checked)

    def recorded(self, entry: str) -> tuple[VerifiedFile, InputSpecs, str] | None:
        """Returns an earlier run's record of a package: the file, its input specs and the digest of the CPU
        library. Returns None if there is no valid record, or if the file has changed since its check."""
        path = self.path / entry
        try:
            with open_regular(path.with_suffix(".json")) as file:
                record: dict[str, Any] = json.loads(file.read(_RECORD_BYTES))
            package = VerifiedFile.of(path)
            if package.blob != Blob(record["digest"], record["size"]):
                return None
            return package, record["signature"], str(record["library"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
