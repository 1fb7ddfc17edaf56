"""Names the cases of `snapcap bench modes`. A case that restores comes after the case that saves."""

from collections.abc import Iterable
from dataclasses import dataclass

EAGER = "eager"
_TUNED = "max-autotune"
_REDUCED = "reduce-overhead"


@dataclass(frozen=True)
class Case:
    """The options of `benchmarks.compile.case`. ``restores`` names the case whose files this one reads."""

    title: str
    options: tuple[str, ...]
    restores: str = ""
    cuda: bool = False  # the case needs a GPU


CASES = {
    EAGER: Case("eager", ("eager",)),
    "full": Case("full model", ("full",)),
    "full-restored": Case("full model, restored", ("full",), restores="full"),
    "hierarchical": Case("full model, nested regions", ("hierarchical",)),
    "regional": Case("regional", ("regional",)),
    "regional-restored": Case("regional, restored", ("regional",), restores="regional"),
    "jit": Case("regional as jit", ("jit",)),
    "jit-restored": Case("regional as jit, restored", ("jit",), restores="jit"),
    "encoder": Case("regional, encoder alone", ("regional", "--only", "encoder")),
    "decoder": Case("regional, decoder alone", ("regional", "--only", "decoder")),
    "tuned-encoder": Case("regional, encoder max-autotune", ("regional", "--encoder-mode", _TUNED)),
    "tuned-decoder": Case("regional, decoder max-autotune", ("regional", "--decoder-mode", _TUNED)),
    "tuned": Case("regional, both max-autotune", ("regional", "--encoder-mode", _TUNED, "--decoder-mode", _TUNED)),
    "reduce-overhead": Case(
        "full model, reduce-overhead", ("full", "--encoder-mode", _REDUCED, "--decoder-mode", _REDUCED), cuda=True
    ),
}


def with_needed(names: Iterable[str]) -> list[str]:
    """Returns these cases, eager for comparison, and the cases that they restore, in order."""
    wanted = {EAGER, *names}
    wanted |= {CASES[name].restores for name in wanted}
    return [name for name in CASES if name in wanted]
