"""Launches a GPU's kernels once while torch is imported: those of packages, or else of torch's own operators.

CUDA loads a kernel when it is first launched: on an H200 the products and the attention of one bucket take 0.1 s,
and every bucket has its own. The driver needs no lock of Python's for that, nor do packages and operators that are
called through their C interfaces; importing torch holds it nearly all the time. So this is over about when torch
has been imported.

It is done on the thread that serves afterwards: what libraries keep for each thread, such as cuBLAS's handle and
cuDNN's plans (45 ms for each bucket's attention), would have to be made again on another.
"""

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from snapcap.warmup.errors import first_line
from snapcap.warmup.machine.torch_libraries import load_torch_libraries
from snapcap.warmup.plan.artifacts import Artifacts
from snapcap.warmup.runtime.aoti.container import AotiError, Container
from snapcap.warmup.runtime.aoti.eager_launches import Launch
from snapcap.warmup.runtime.aoti.operators import Operators
from snapcap.warmup.runtime.aoti.packages import wanted
from snapcap.warmup.runtime.aoti.tensors import Zeros, run_on_zeros

_logger = logging.getLogger("snapcap.start")


def open_ahead(artifacts: Artifacts, device: str, sizes: Sequence[int]) -> Mapping[str, Container]:
    """The containers of the set's packages for buckets of these sizes, by entry name; but for what only some
    requests need. ``device``: "cpu", or as "cuda:0".

    A failure is logged, and what was opened by then is returned: whoever misses a package opens it in the usual
    way, and reports what is wrong with it.
    """
    opened: dict[str, Container] = {}
    libtorch = load_torch_libraries()
    if libtorch is None:
        return opened
    try:
        # Mapped on another thread: what is there can run.
        with ThreadPoolExecutor(1, thread_name_prefix="snapcap-packages") as pool:
            opening = {
                entry: pool.submit(Container.open, path, device)
                for entry, path in artifacts.fetched.entries.items()
                if wanted(entry, sizes)
            }
            zeros = Zeros.on(libtorch, device)
            for entry, container in opening.items():
                run_on_zeros(container.result(), artifacts.input_specs[entry], zeros)
                opened[entry] = container.result()
    except (AotiError, KeyError, TypeError, ValueError) as error:
        _logger.warning("packages not opened ahead", extra={"fields": {"error": first_line(error)}})
    return opened


def launch_ahead(launches: Iterable[Launch], device: str) -> None:
    """Run operators once each. What fails is logged, and loaded when it is needed."""
    libtorch = load_torch_libraries()
    if libtorch is None:
        return
    failed = []
    try:
        operators = Operators(ctypes.CDLL(None, handle=libtorch), Zeros.on(libtorch, device))
        for launch in launches:
            try:
                operators.run(launch)
            except AotiError:
                failed.append(launch.operator)
    except AotiError as error:
        failed.append(first_line(error))
    if failed:
        _logger.warning("operators not launched ahead", extra={"fields": {"error": ", ".join(failed)}})
