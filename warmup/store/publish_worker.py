"""Publishes to S3 in a child process, so that a server never imports boto3 while it serves.

    stdin   {"store": …, "local": folder, "key": …, …}, then {} to publish
    stdout  {"result": …, "reason": …}

Publishes the set of a key that is in the local folder, if it could be loaded from there: signing makes it good for
every server. Run as ``python -m snapcap.warmup.store.publish_worker``.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snapcap.warmup.artifacts.signing import Trust, load_signer
from snapcap.warmup.machine.child import Task, serve_lines
from snapcap.warmup.options import S3Options
from snapcap.warmup.store.fetch import fetch
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.open import open_store
from snapcap.warmup.store.publish import publish
from snapcap.warmup.store.store import StoreError


def _start(job: dict[str, Any]) -> Task:
    trust = Trust.from_files(map(Path, job["trusted_keys"]), job["allow_unsigned"])
    remote = open_store(job["store"], S3Options(**job["s3"]), trust)
    signer = load_signer(Path(job["sign_key"])) if job["sign_key"] else None

    def publish_set(_task: dict[str, Any]) -> dict[str, Any]:
        found = fetch(None, FolderStore.open(Path(job["local"])), job["key"], {}, trust, job["s3"]["deadline"])
        if found.manifest is None:
            raise StoreError(found.reason)
        files = {name: file.path for name, file in found.entries.items()}
        return asdict(publish(remote, found.manifest, files, signer, job["replace"]))

    return publish_set


if __name__ == "__main__":
    sys.exit(serve_lines(_start))
