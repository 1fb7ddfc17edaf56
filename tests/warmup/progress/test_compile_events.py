"""The compiler's counters, without a compiler."""

import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

from snapcap.warmup.progress.status import CacheCounts, cache_counts, compiled_graphs


def test_where_nothing_compiles_all_counts_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert (compiled_graphs(), cache_counts()) == (0, CacheCounts(0, 0, 0))


def test_lookups_of_both_caches_add_up_and_reading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    assert (compiled_graphs(), cache_counts()) == (0, CacheCounts(0, 0, 0))
    assert not counters
    counters["stats"]["unique_graphs"] = 4
    counters["aot_autograd"].update(autograd_cache_hit=3, autograd_cache_miss=1)
    counters["inductor"].update(fxgraph_cache_hit=2, fxgraph_cache_bypass=1, extern_calls=9)
    assert compiled_graphs() == 4
    assert cache_counts() == CacheCounts(hits=5, misses=1, bypasses=1)
