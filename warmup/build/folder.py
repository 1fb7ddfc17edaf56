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
    """Of one key, so that an interrupted build of it goes on where it was."""

    path: Path

    def make(self) -> None:
        """Raises OSError."""
        make_folder(self.path)

    def record(self, entry: str, specs: InputSpecs, checked: Blob, library: str = "") -> VerifiedFile:
        """Note that a package has passed as what it was when it was checked; without that it counts as not made.
        ``library``: the digest of the CPU library that it has passed on as well.

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
        """What was recorded of a package by an earlier run, if it is still what was checked then."""
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
