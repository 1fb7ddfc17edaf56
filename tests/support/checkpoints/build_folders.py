"""Makes stores that have packages of another build: a test then compiles little instead of much."""

import json
import re
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from support.servers.server_process import snapcap

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


# Regions that choose tokens have the same code for every model of one vocabulary, cache length and number of slots.
CHOICES = ("decoder_penalties", "decoder_sampling")
# The beams' region also reads the caches of the captions' keys and values: it has the same code where they have the
# demo model's shape.
CHOICES_AND_BEAMS = (*CHOICES, "decoder_beams")


def key_of(cache: Path, *options: str) -> str:
    """Returns the artifact key of a build with these options."""
    explained = snapcap("explain", "--cache-dir", str(cache), *options)
    (key,) = re.findall(r"^key +(\w+)", explained.stdout, re.MULTILINE)
    return str(key)


def take_packages(built_cache: Path, regions: Sequence[str], sizes: Sequence[int], build: Path) -> None:
    """Puts packages of the demo model into a build folder for which the same code would be compiled. A start
    compares their inputs with its model's."""
    (built,) = (built_cache / "store" / "builds").iterdir()
    (build / "aot").mkdir(mode=0o700, parents=True)
    for region, size, suffix in product(regions, sizes, (".json", ".pt2")):
        name = f"aot/{region}.b{size}{suffix}"
        shutil.copy(built / name, build / name)


def build_with_choices(built_cache: Path, cache: Path, *options: str, taken: Sequence[str] = CHOICES) -> None:
    """Builds a model of the demo model's vocabulary and cache length for bucket 4. The regions of ``taken`` are not
    compiled: CHOICES, or CHOICES_AND_BEAMS."""
    build = cache / "store" / "builds" / key_of(cache, *options)
    take_packages(built_cache, taken, (4,), build)
    (cache / "store").chmod(0o700)
    options = ("--cache-dir", str(cache), *options, "--prepared-weights", "--build-workers", "1")
    run = snapcap("build", *options, timeout=600)
    assert run.returncode == 0, run.stderr
    events = [line.split()[0] for line in run.stderr.splitlines() if " × " in line]
    assert events.count("kept") == len(taken), run.stderr
    (demo,) = (built_cache / "store" / "builds").iterdir()
    ours, theirs = (json.loads((each / "aot/decoder_beams.b4.json").read_text()) for each in (build, demo))
    # Logits, whether they are normalised, tokens, positions, the prompt and ends; then the caches follow.
    assert ours["signature"][:6] == theirs["signature"][:6], "another vocabulary or cache length"
