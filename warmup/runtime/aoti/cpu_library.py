"""Opens the CPU library, on which packages in float32 run where torch's libraries are not loaded.

A package for a CPU calls a few dozen functions of libtorch, whose libraries take longer to map and initialise than
the rest of a start takes. The CPU library, whose C++ sources are in `cpp` beside this file, has these functions
under the same names. A build compiles it, checks each package on it as well as on libtorch, and puts it into the
artifact set where all of them pass. A package is the same file for both. Processes that have torch run packages on
libtorch.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.warmup.machine.dynamic_library import open_library
from snapcap.warmup.machine.torch_libraries import let_threads_sleep, open_libgomp
from snapcap.warmup.runtime.aoti.container import AotiError
from snapcap.warmup.runtime.aoti.package_library import library_file

if TYPE_CHECKING:
    from snapcap.warmup.store.blobs import VerifiedFile

SOURCES = Path(__file__).parent / "cpp"


def open_cpu_library(library: "VerifiedFile") -> int:
    """The handle of the library, which stays mapped; packages that are opened ``standalone`` find it by its name.

    Raises:
        AotiError: it cannot be loaded, or has changed since it was verified.
    """
    let_threads_sleep()
    open_libgomp()
    try:
        with library_file(library.read()) as name:
            return open_library(name)
    except OSError as error:
        raise AotiError(f"the CPU library cannot be opened: {error}") from error
