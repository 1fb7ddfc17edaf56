"""Runs `snapcap keygen`: makes an Ed25519 key pair for signing artifacts."""

import sys
from pathlib import Path

from snapcap.warmup.artifacts.signing import KeyFileError, generate_key


def keygen(private: Path) -> int:
    """Writes the private key (mode 0600) and, beside it, the public key. Returns the exit status."""
    try:
        public = generate_key(private)
    except KeyFileError as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return 1
    print(f"{private}\tprivate: `snapcap build --sign-key {private}`; keep it where builds run")
    print(f"{public}\tpublic: `snapcap serve --trusted-key {public}`")
    return 0
