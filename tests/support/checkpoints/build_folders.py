"""Makes stores whose build was interrupted, of one that is whole: a test then compiles little instead of much."""

import shutil
from collections.abc import Sequence
from pathlib import Path

LEFT_OUT = "aot/decoder_before.b4"  # compiled more quickly than the others
PACKAGES = 18  # number of the demo model's packages for two buckets


def nearly_built(built_cache: Path, store: Path, missing: Sequence[str] = (LEFT_OUT,)) -> Path:
    """A store without artifacts, whose build folder, which is returned, lacks the ``missing`` packages."""
    store.mkdir(mode=0o700, parents=True)
    shutil.copytree(built_cache / "store" / "builds", store / "builds")
    (build,) = (store / "builds").iterdir()
    for name in missing:
        for suffix in (".json", ".pt2"):
            (build / f"{name}{suffix}").unlink()
    return build
