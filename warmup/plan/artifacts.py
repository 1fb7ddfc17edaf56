"""Holds what came of a start's search for artifacts. No torch, and nothing of the store."""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass

if TYPE_CHECKING:
    from snapcap.warmup.artifacts.key import Factors
    from snapcap.warmup.store.fetch import Fetched


CPU_LIBRARY = "aot/cpu_library.so"  # the entry that packages run on where torch's libraries are not loaded


@dataclass(frozen=True)
class Artifacts:
    """The key this start looked for, and what came of it."""

    key: str
    factors: "Factors"
    fetched: "Fetched"
    input_specs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hit(self) -> bool:
        return self.fetched.result == "hit"
