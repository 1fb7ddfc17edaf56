"""Only the edges in front of kernels that wait by themselves are changed in a graph. The driver is made up."""

import ctypes
from typing import Any

import pytest

from snapcap.warmup.runtime.aoti import launch_ahead
from snapcap.warmup.runtime.aoti.launch_ahead import GraphEdges

FULL, EARLY = (0, 0, 0), (1, 0, 1)
GRAPH = 77


class Driver:
    """A graph of kernels by name (None: a copy), and its edges with their kinds."""

    def __init__(self, names: dict[int, bytes | None], edges: dict[tuple[int, int], tuple[int, int, int]]) -> None:
        self.names, self.edges = names, dict(edges)
        self.refused = ""

    def cuGraphGetEdges_v2(self, graph: Any, sources: Any, targets: Any, kinds: Any, count: Any) -> int:  # noqa: N802  the driver's name
        assert graph.value == GRAPH
        count._obj.value = len(self.edges)
        if sources is not None:
            for place, ((source, target), kind) in enumerate(self.edges.items()):
                sources[place], targets[place] = source, target
                kinds[place].from_port, kinds[place].to_port, kinds[place].type = kind
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = 0 if self.names[node.value] is not None else 1
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, launch: Any) -> int:  # noqa: N802
        assert self.names[node.value] is not None
        # Kernels of even nodes belong to a context, the others to a library.
        launch._obj.function, launch._obj.kernel = (node.value, None) if node.value % 2 == 0 else (None, node.value)
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:  # noqa: N802
        assert function.value % 2 == 0
        name._obj.value = self.names[function.value]
        return 0

    def cuKernelGetName(self, name: Any, kernel: Any) -> int:  # noqa: N802
        assert kernel.value % 2 == 1
        name._obj.value = self.names[kernel.value]
        return 0

    def cuGraphRemoveDependencies_v2(self, graph: Any, *edges: Any) -> int:  # noqa: N802
        for key, kind in read(*edges).items():
            assert self.edges.pop(key) == kind, "an edge is removed by its kind"
        return 0

    def cuGraphAddDependencies_v2(self, graph: Any, *edges: Any) -> int:  # noqa: N802
        if self.refused:
            return 1
        self.edges |= read(*edges)
        return 0


def read(sources: Any, targets: Any, kinds: Any, count: ctypes.c_size_t) -> dict[tuple[int, int], Any]:
    numbers = range(count.value)
    return {(sources[n], targets[n]): (kinds[n].from_port, kinds[n].to_port, kinds[n].type) for n in numbers}


def test_a_kernel_that_waits_by_itself_begins_before_the_one_in_front_has_ended() -> None:
    driver = Driver({2: b"embed", 3: b"_few_rows_ahead", 4: b"_norm_ahead"}, {(2, 3): FULL, (3, 4): FULL})
    assert GraphEdges(driver).launch_ahead(GRAPH) == 2
    assert driver.edges == {(2, 3): EARLY, (3, 4): EARLY}


@pytest.mark.parametrize(
    ("names", "edges"),
    [
        pytest.param({2: b"_norm_ahead", 3: b"triton_poi"}, {(2, 3): FULL}, id="a kernel that does not wait"),
        pytest.param({2: None, 3: b"_norm_ahead"}, {(2, 3): FULL}, id="behind a copy"),
        pytest.param({2: b"a", 3: b"b", 4: b"_norm_ahead"}, {(2, 4): FULL, (3, 4): FULL}, id="behind two kernels"),
        pytest.param({2: b"a", 3: b"_norm_ahead"}, {(2, 3): EARLY}, id="already early"),
        pytest.param({}, {}, id="one kernel alone"),
    ],
)
def test_every_other_edge_stays(names: dict[int, bytes | None], edges: dict[tuple[int, int], Any]) -> None:
    driver = Driver(names, edges)
    assert GraphEdges(driver).launch_ahead(GRAPH) == 0
    assert driver.edges == edges


def test_a_graph_that_the_driver_does_not_change_is_not_used() -> None:
    driver = Driver({2: b"a", 3: b"_norm_ahead"}, {(2, 3): FULL})
    driver.refused = "always"
    with pytest.raises(OSError, match="error 1 of the CUDA driver"):
        GraphEdges(driver).launch_ahead(GRAPH)


def test_devices_before_9_and_older_drivers_launch_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GraphEdges.of_device(8) is None

    def missing(name: str) -> int:
        raise OSError("there is no driver")

    monkeypatch.setattr(launch_ahead, "open_library", missing)
    assert GraphEdges.of_device(9) is None
    monkeypatch.setattr(launch_ahead, "open_library", lambda name: ctypes.PyDLL(None)._handle)
    assert GraphEdges.of_device(9) is None, "a library without these functions"
