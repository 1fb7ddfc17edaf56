"""Writes prepared weights to a file, as they are, for tests of what reads them."""

import hashlib
from pathlib import Path

from snapcap.models.regions.table import Weights
from snapcap.models.weights.load import lay_out


def write_prepared(path: Path, weights: Weights, key: str) -> None:
    contents = lay_out(weights, key)
    chunks = list(contents.chunks())
    path.write_bytes(
        contents.header_bytes([hashlib.sha256(each).hexdigest() for each in chunks]) + b"".join(chunks)
    )
