"""Takes the pack of a set away, so that its files come one by one, from each kind of store."""

from collections.abc import Iterable

from snapcap.warmup.artifacts.manifest import Blob
from snapcap.warmup.artifacts.packs import Pack
from snapcap.warmup.artifacts.store import ArtifactStore


def delete_pack(store: ArtifactStore, blobs: Iterable[Blob]) -> None:
    """Nothing to do where there is none."""
    pack = Pack.of(blobs)
    if pack is not None:
        store.delete(pack.name)
