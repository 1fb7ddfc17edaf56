"""Describes the work of the engine, for the metrics of the HTTP process."""

from typing import NamedTuple


class Batch(NamedTuple):
    """An encoder batch or a decode step. ``rows``: number of its real rows; ``bucket`` counts padding too."""

    bucket: int
    rows: int
    seconds: float


class Work(NamedTuple):
    """Describes a decode step, and the encodes launched since the step before. ``waited``: seconds that each of the
    encoded requests was queued. ``generated``: number of tokens of the step, prompts not counted."""

    step: Batch
    encodes: list[Batch]
    waited: list[float]
    generated: int
