"""Compiled code with weights of int8 captions as its eager self does, and runs without torch."""

from pathlib import Path

from support.servers.server_process import python

_CAPTIONS = """
import sys
from snapcap import Captioner
cache, backend, *images = sys.argv[1:]
with Captioner(cache_dir=cache, backend=backend, dtype="int8", device="cpu", buckets=(4,), strict=True) as one:
    print(one.backend, "torch" in sys.modules)
    for options in ({}, {"num_beams": 3}, {"prompt": "a photo of"}, {"repetition_penalty": 1.3}):
        print([caption.text for caption in one.batch(images, **options)])
"""


def test_captions_are_the_same_compiled_and_eager(int8_cache: Path, samples: dict[Path, str]) -> None:
    """There are more images than rows, so rows move to other slots while they run."""
    printed = []
    for backend in ("aot", "eager"):
        run = python("-c", _CAPTIONS, str(int8_cache), backend, *map(str, samples))
        assert run.returncode == 0, run.stderr
        first, *lines = run.stdout.splitlines()
        assert first == f"{backend} {backend == 'eager'}"
        printed.append(lines)
    assert printed[0] == printed[1]
    assert printed[0][:2] == [str([*samples.values()])] * 2
