"""Opens packages that AOTInductor compiled, checks their inputs and runs them, without torch's Python module.

A package is one file for a region and bucket. Its shared library is written to a file in memory, from which the
dynamic linker loads it. torch's own loader is part of its module, unpacks a package into the temporary folder, and
leaves the files there if its process is killed. Files in memory need no cleanup.

A package for a CPU calls a few dozen functions of libtorch, whose libraries take longer to map and initialise than
the rest of a start. The CPU library, whose C++ sources are in `cpp` beside this file, has these functions under the
same names. A build compiles this library, checks each package on it as well as on libtorch, and puts it into the
artifact set if all packages pass. A package is the same file for both. Processes with torch run packages on
libtorch.

A package exports the functions of torch/csrc/inductor/aoti_runtime/interface.h, and libtorch exports those of
torch/csrc/inductor/aoti_torch/c/shim.h to packages. torch keeps both stable, because packages of earlier versions
must work.
"""

import ctypes
import io
import re
import zipfile
import zlib
from concurrent.futures import Future
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.machine.cuda_driver import open_library
from snapcap.warmup.machine.denied import library_file
from snapcap.warmup.machine.worker import fulfil
from snapcap.warmup.plan.plan import Bucket, Plan

if TYPE_CHECKING:
    from snapcap.models.regions.table import Region, Regions

MODEL_NAME = "model"  # the one model inside each package

_ENTRY = re.compile(r"aot/(?P<region>\w+)\.b(?P<size>\d+)\.pt2")

# [dtype, shape, strides] of each input. Manifests and build records call this "signature".
InputSpecs = list[list[Any]]


class PackageError(RuntimeError):
    """Names in one line a package that cannot be opened."""


class InputSpecError(RuntimeError):
    """Refuses a package that was built for other inputs: it would read past them or compute wrong numbers."""


def entry_name(region: str, size: int) -> str:
    """Returns the entry name of a package, such as ``aot/encoder_block.b4.pt2``."""
    return f"aot/{region}.b{size}.pt2"


def region_of(entry: str) -> tuple[str, int]:
    """Returns region and bucket size of an entry name. Raises ValueError if it is no name of a package."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry} is no name of a package")
    return match["region"], int(match["size"])


def entry_names(regions: "Regions", plan: Plan) -> list[tuple["Region", Bucket, str]]:
    """Returns every package of a plan's set, in the order of warm-up: the smallest buckets first, because a lone
    request needs them, and packages that are opened on demand last."""
    return [
        (region, bucket, entry_name(region.name, bucket.size))
        for on_demand in (False, True)
        for bucket in plan.step_table.buckets
        for region in regions
        if region.on_demand is on_demand and bucket.size in plan.sizes(region.component)
    ]


def check_inputs(entry: str, expected: object, actual: InputSpecs) -> None:
    """Compare the input specs that a package was built for with the actual ones, because a package checks nothing
    itself. Raises InputSpecError with the first input that differs."""
    if not isinstance(expected, list) or len(expected) != len(actual):
        count = len(expected) if isinstance(expected, list) else 0
        raise InputSpecError(f"{entry} was built for {count} inputs, the region has {len(actual)}")
    for position, (built, given) in enumerate(zip(expected, actual, strict=True)):
        if built != given:
            raise InputSpecError(f"{entry}: input {position} was built as {built}, but is {given}")


def is_whole(package: Path) -> bool:
    """Returns whether every file of a package has content."""
    with zipfile.ZipFile(package) as members:
        return all(member.file_size for member in members.infolist() if not member.is_dir())


def slim(package: Path) -> None:
    """Empty the generated sources of a package and compress it, to about a tenth of its size.

    The loader reads only the shared library and its metadata, but torch 2.11 finds the metadata by the name of the
    source file, so this file stays. Members keep their order and get a fixed date, so equal contents give equal
    bytes."""
    slimmed = package.with_suffix(".slim")
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(slimmed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            info = zipfile.ZipInfo(member.filename, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = member.external_attr
            info.compress_type = zipfile.ZIP_DEFLATED
            generated = member.filename.endswith((".cpp", ".h"))
            target.writestr(info, b"" if generated else source.read(member))
    slimmed.replace(package)


_MODELS = f"/data/aotinductor/{MODEL_NAME}/"
_METADATA = "_metadata.json"


CPU_LIBRARY_SONAME = "snapcap"
_OURS = CPU_LIBRARY_SONAME.encode()
# Names in a package for a CPU, and the CPU library's names, which are not longer: names of the libraries that the
# package links, and of OpenMP's functions. Under OpenMP's names, libgomp's would be found in a process with torch.
_STANDALONE = {
    **dict.fromkeys((b"libtorch_cpu.so", b"libtorch.so", b"libc10.so", b"libgomp.so.1"), _OURS),
    b"GOMP_parallel": b"run_parallel",
    b"GOMP_barrier": b"run_barrier",
    b"GOMP_single_start": b"run_single_start",
    b"omp_get_num_threads": b"run_num_threads",
    b"omp_get_thread_num": b"run_thread_num",
}


def package_content(package: Path | IO[bytes], standalone: bool = False) -> bytes:
    """Returns the shared library of a package. Raises OSError if the package has no single library, or calls
    operators that need Python's dispatcher, and zipfile.BadZipFile or zlib.error if the file is no package, or is
    damaged.

    Args:
        package: the file, or its content, opened for reading.
        standalone: replace the names of torch's libraries and of OpenMP by those of the CPU library.
    """
    content = _library(package)
    if not standalone:
        return content
    for name, ours in _STANDALONE.items():
        content = content.replace(b"\0" + name + b"\0", b"\0" + ours.ljust(len(name), b"\0") + b"\0")
    return content


def _library(package: Path | IO[bytes]) -> bytes:
    with zipfile.ZipFile(package) as members:
        names = [name for name in members.namelist() if _MODELS in name]
        libraries = [name for name in names if name.endswith(".so")]
        if len(libraries) != 1:
            raise OSError(f"it holds {len(libraries)} libraries, not one")
        if any(name.endswith(".json") and not name.endswith(_METADATA) for name in names):
            # These operators have no C function; only a ProxyExecutor can call them.
            raise OSError("it calls operators of Python's dispatcher")
        return members.read(libraries[0])


class AotiError(RuntimeError):
    """Says in one line why a package cannot be opened or run."""


class CaptureError(AotiError):
    """Says that recording launches was aborted; this process cannot use the device any more."""


@dataclass(frozen=True)
class Container:
    """Holds a loaded package: its mapped library and its model, both of which stay until the process ends.

    Only one thread at a time may run a container. Other threads may run other containers meanwhile, because a run
    releases Python's interpreter lock."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p

    @classmethod
    def open(cls, package: VerifiedFile, device: str, standalone: bool = False) -> "Container":
        """Map the library of a package, and make its model on a device, such as ``cuda:0``. ``standalone``: run on
        the CPU library, which must be open, instead of libtorch. Raises AotiError if the file has changed since it
        was verified, is no package, or needs other functions."""
        try:
            with library_file(package_content(io.BytesIO(package.read()), standalone)) as name:
                library = ctypes.CDLL(name, handle=open_library(name))
            create = library.AOTInductorModelContainerCreateWithDevice
            _ = library.AOTInductorModelContainerRunSingleThreaded  # a missing function is noticed now
        except (OSError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise AotiError(str(error)) from error
        handle = ctypes.c_void_p()
        status = create(ctypes.byref(handle), ctypes.c_size_t(1), device.encode(), None)
        if status != 0:
            raise AotiError(f"its model cannot be made on {device}")
        return cls(library, handle)

    def run(self, given: "ctypes.Array[ctypes.c_void_p]", stream: int | None) -> int:
        """Run the model on a CUDA stream (None: the default stream).

        ``given``: AtenTensorHandles in the order of the package's inputs. The run takes ownership of them; the
        caller may reuse the array. Returns the AtenTensorHandle of the only output, which the caller owns. Raises
        AotiError if an operator failed; its message is on the standard error of the process."""
        output = ctypes.c_void_p()
        # The multi-threaded variant has locks and events, which break the capture of a CUDA graph.
        status = self.library.AOTInductorModelContainerRunSingleThreaded(
            self.handle,
            given,
            ctypes.c_size_t(len(given)),
            ctypes.byref(output),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
            None,
        )
        if status != 0 or output.value is None:
            raise AotiError("it failed while it ran")
        return output.value


@dataclass(frozen=True)
class Containers:
    """Opens packages on a device.

    standalone: as in ``Container.open``. opening: containers that other threads open, or have opened, by entry."""

    device: str
    standalone: bool = False
    opening: dict[str, "Future[Container]"] = field(default_factory=dict)

    def prepare(self, entry: str, package: VerifiedFile) -> None:
        """Opens a package, on any thread. A later ``open`` returns the container, or raises the error."""
        opened: Future[Container] = Future()
        fulfil(opened, partial(Container.open, package, self.device, self.standalone))
        self.opening[entry] = opened

    def open(self, entry: str, package: VerifiedFile) -> Container:
        """Returns the container of a package. Raises PackageError if the package cannot be opened."""
        try:
            opening = self.opening.get(entry)
            if opening is not None:
                return opening.result()
            return Container.open(package, self.device, self.standalone)
        except AotiError as error:
            raise PackageError(f"{entry} cannot be opened: {error}") from error


SOURCES = Path(__file__).parent / "cpp"


def open_cpu_library(library: VerifiedFile) -> int:
    """Loads the CPU library and returns its handle. The library stays mapped, and ``standalone`` packages find it
    by its name. Raises AotiError if it cannot be loaded, or has changed since it was verified."""
    try:
        with library_file(library.read()) as name:
            return open_library(name)
    except OSError as error:
        raise AotiError(f"the CPU library cannot be opened: {error}") from error
