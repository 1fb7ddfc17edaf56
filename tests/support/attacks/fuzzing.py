"""Sets how much every fuzzer tries, and reads the corpus in the tree.

In CI the examples are the same each time. `FUZZ_EXAMPLES=200000 python -m pytest tests/fuzz` tries so many new ones
of each kind.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """Decorates a test: so many examples, the same each time, unless the environment asks for others."""
    asked = os.environ.get("FUZZ_EXAMPLES")
    return settings(
        max_examples=int(asked) if asked else examples,
        derandomize=asked is None,
        database=None,  # a crash that was found goes into the corpus
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def corpus(kind: str) -> list[bytes]:
    """The files of a kind: good ones, and those at which something failed once."""
    return [path.read_bytes() for path in sorted((CORPUS / kind).iterdir())]
