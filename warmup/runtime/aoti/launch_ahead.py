"""Lets kernels of a recorded CUDA graph begin before the kernel in front of them has ended.

A small kernel takes about as long to begin as to run. A kernel of `models.kernels` whose name ends in ``_ahead``
first loads what no other kernel of a step writes, and then waits for the kernel in front of it, so it may begin
early (programmatic dependent launch). Packages launch every kernel behind the end of the one before. But a recorded
graph can be changed before it is instantiated: the edge from one kernel to the next becomes a programmatic edge.
Functions and structures have the names of the CUDA driver API.
"""

import ctypes
import logging
from collections import Counter
from typing import Any

from snapcap.warmup.machine.cuda_driver import LIBRARY, open_library

AHEAD = b"_ahead"
LEAST_MAJOR = 9  # the least compute capability, as in `models.kernels.launch.ahead`
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, and CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
_logger = logging.getLogger("snapcap.start")


class _Edge(ctypes.Structure):
    """CUgraphEdgeData"""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class _Launch(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid_and_block", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class GraphEdges:
    """Changes recorded graphs through the CUDA driver."""

    def __init__(self, driver: Any) -> None:
        """``driver`` has the functions of the CUDA driver. Raises AttributeError if it is older than 12.3."""
        self._kind = driver.cuGraphNodeGetType
        self._launch = driver.cuGraphKernelNodeGetParams_v2
        self._function_name = driver.cuFuncGetName
        self._kernel_name = driver.cuKernelGetName
        self._edges = driver.cuGraphGetEdges_v2
        self._remove = driver.cuGraphRemoveDependencies_v2
        self._add = driver.cuGraphAddDependencies_v2

    @classmethod
    def of_device(cls, major: int) -> "GraphEdges | None":
        """Returns an instance for a device of this compute capability, or None if the device or its driver cannot
        launch kernels early."""
        if major < LEAST_MAJOR:
            return None
        try:
            return cls(ctypes.PyDLL(None, handle=open_library(LIBRARY)))
        except (OSError, AttributeError) as error:
            fields = {"error": str(error)}
            _logger.info("this CUDA driver launches no kernel early: steps take longer", extra={"fields": fields})
            return None

    def launch_ahead(self, graph: int) -> int:
        """Changes each edge between two kernels if the second kernel waits by itself and depends on no other node.
        If the driver does not describe the graph, all edges stay. Raises OSError if the driver changed a part of
        the graph and refused the rest; the graph must not be used.

        Args:
            graph: the CUgraph, not yet instantiated.

        Returns:
            The number of kernels that may begin early.
        """
        try:
            chosen = self._chosen(graph)
        except OSError as error:
            fields = {"error": str(error)}
            _logger.warning(
                "this CUDA driver does not describe a graph: steps take longer", extra={"fields": fields}
            )
            return 0
        if not chosen:
            return 0
        count = len(chosen)
        edges = [(ctypes.c_void_p * count)(*nodes) for nodes in zip(*chosen, strict=True)]
        full, early = (_Edge * count)(), (_Edge * count)(*[_Edge(_PROGRAMMATIC, 0, _PROGRAMMATIC)] * count)
        for change, kind in ((self._remove, full), (self._add, early)):
            _require("changing a graph", change(ctypes.c_void_p(graph), *edges, kind, ctypes.c_size_t(count)))
        return count

    def _chosen(self, graph: int) -> list[tuple[int, int]]:
        """Returns the edges to change, each as its first and its second node."""
        sources, targets, kinds = self._read_edges(graph)
        before = Counter(targets)
        names = {node: self._name(node) for node in {*sources, *targets}}
        return [
            (source, target)
            for source, target, kind in zip(sources, targets, kinds, strict=True)
            if kind.type == 0 and before[target] == 1 and names[source] and names[target].endswith(AHEAD)
        ]

    def _read_edges(self, graph: int) -> tuple[list[int], list[int], list[_Edge]]:
        """Returns the first and the second node of each edge, and its kind."""
        handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
        _require("counting edges", self._edges(handle, None, None, None, ctypes.byref(count)))
        sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        kinds = (_Edge * count.value)()
        if count.value:
            _require("reading edges", self._edges(handle, sources, targets, kinds, ctypes.byref(count)))
        return list(sources), list(targets), list(kinds)

    def _name(self, node: int) -> bytes:
        """Returns the name of a node's kernel; empty if the node is no kernel."""
        handle, kind = ctypes.c_void_p(node), ctypes.c_int()
        _require("reading a node", self._kind(handle, ctypes.byref(kind)))
        if kind.value != _KERNEL:
            return b""
        launch, name = _Launch(), ctypes.c_char_p()
        _require("reading a launch", self._launch(handle, ctypes.byref(launch)))
        get, function = self._function_name, launch.function
        if not function:  # a kernel of a library that is loaded for all contexts
            get, function = self._kernel_name, launch.kernel
        _require("reading a name", get(ctypes.byref(name), ctypes.c_void_p(function)))
        return name.value or b"?"


def _require(action: str, status: int) -> None:
    if status != 0:
        raise OSError(f"{action} failed with error {status} of the CUDA driver")
