"""Opens packages that AOTInductor compiled, checks their inputs and runs them, without torch's Python module.

A package is one file for a region and bucket. Its shared library is put into a file in memory, which the dynamic
linker can load. torch's own loader, which is part of its module, unpacks a package into a folder below the
temporary one, and leaves it there when its process is killed. Here nothing is made that somebody would have to find
again to remove it.

A package for a CPU calls a few dozen functions of libtorch, whose libraries take longer to map and initialise than
the rest of a start takes. The CPU library, whose C++ sources are in `cpp` beside this file, has these functions
under the same names. A build compiles it, checks each package on it as well as on libtorch, and puts it into the
artifact set where all of them pass. A package is the same file for both. Processes that have torch run packages on
libtorch.

The names of functions are those of torch/csrc/inductor/aoti_runtime/interface.h, which a package exports, and of
torch/csrc/inductor/aoti_torch/c/shim.h, which libtorch exports to packages. Both are kept stable, as packages of
earlier versions of torch have to work.
"""

import ctypes
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.machine.cuda_driver import open_library
from snapcap.warmup.machine.denied import library_file
from snapcap.warmup.machine.torch_libraries import let_threads_sleep, open_libgomp
from snapcap.warmup.plan.plan import Bucket

if TYPE_CHECKING:
    from snapcap.models.regions.table import Region, Regions

MODEL_NAME = "model"  # the one model inside each package

_ENTRY = re.compile(r"aot/(?P<region>\w+)\.b(?P<size>\d+)\.pt2")

# Per input: [dtype, shape, strides]. Manifests and the records of builds have it under "signature".
InputSpecs = list[list[Any]]


class PackageError(RuntimeError):
    """A package that cannot be opened; one line that names it."""


class InputSpecError(RuntimeError):
    """A package that was built for other inputs; running it would read past them or give wrong numbers."""


def entry_name(region: str, size: int) -> str:
    """``aot/encoder_block.b4.pt2``"""
    return f"aot/{region}.b{size}.pt2"


def region_of(entry: str) -> tuple[str, int]:
    """Returns the region and bucket size that ``entry_name`` made a name of. Raises ValueError if it is no name of
    a package."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry} is no name of a package")
    return match["region"], int(match["size"])


def entry_names(regions: "Regions", sizes: Sequence[int]) -> list[tuple["Region", Bucket, str]]:
    """Every package of a set, smallest buckets first: what a lone request needs is ready first, and last what only
    some requests need."""
    return [
        (region, Bucket(size), entry_name(region.name, size))
        for on_demand in (False, True)
        for size in sorted(sizes)
        for region in regions
        if region.on_demand is on_demand
    ]


def check_inputs(entry: str, expected: object, actual: InputSpecs) -> None:
    """Compare what a package was built for with what it is going to be given; a package checks nothing itself.
    Raises InputSpecError if they differ; names the first input that does."""
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
    """Empty the generated sources of a package and compress it: about a tenth to store and to download.

    The loader reads the shared library and its metadata only, but torch 2.11 finds the metadata by the name of the
    source, so that has to stay. Members keep their order and get a fixed date: equal contents give equal bytes.
    """
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


# Names of the libraries that packages for a CPU link, and the name of the CPU library (`cpu_library`).
_TORCH = (b"libtorch_cpu.so", b"libtorch.so", b"libc10.so")
CPU_LIBRARY_SONAME = "snapcap"


def package_content(package: Path | IO[bytes], standalone: bool = False) -> bytes:
    """The shared library of a package.

    Args:
        package: its file, or its content, opened for reading.
        standalone: with the CPU library in the place of torch's, under a name that is no longer than theirs.

    Raises:
        OSError: it is not one library, or calls operators that only Python's dispatcher has.
        zipfile.BadZipFile, zlib.error: it is no package, or a damaged one.
    """
    content = _library(package)
    if not standalone:
        return content
    for name in _TORCH:
        ours = CPU_LIBRARY_SONAME.encode().ljust(len(name), b"\0")
        content = content.replace(b"\0" + name + b"\0", b"\0" + ours + b"\0")
    return content


def _library(package: Path | IO[bytes]) -> bytes:
    with zipfile.ZipFile(package) as members:
        names = [name for name in members.namelist() if _MODELS in name]
        libraries = [name for name in names if name.endswith(".so")]
        if len(libraries) != 1:
            raise OSError(f"it holds {len(libraries)} libraries, not one")
        if any(name.endswith(".json") and not name.endswith(_METADATA) for name in names):
            # Operators that have no C function, which only a ProxyExecutor can call.
            raise OSError("it calls operators of Python's dispatcher")
        return members.read(libraries[0])


class AotiError(RuntimeError):
    """A package that cannot be opened or run; one line."""


class CaptureError(AotiError):
    """Recording launches was broken off; the device is of no more use to this process."""


@dataclass(frozen=True)
class Container:
    """A loaded package: its library is mapped and its model is made. Both stay until the process ends.

    Only one thread at a time may run a container. Runs of other containers go on in parallel: Python's lock is
    free.
    """

    library: ctypes.CDLL
    handle: ctypes.c_void_p

    @classmethod
    def open(cls, package: VerifiedFile, device: str, standalone: bool = False) -> "Container":
        """Map the library of a package, and make its model on a device, as ``cuda:0``.

        Args:
            standalone: on the CPU library, which has been opened, and not on libtorch.

        Raises:
            AotiError: the file has changed since it was verified, is no package, or needs more than this interface.
        """
        try:
            with library_file(package_content(io.BytesIO(package.read()), standalone)) as name:
                library = ctypes.CDLL(name, handle=open_library(name))
            create = library.AOTInductorModelContainerCreateWithDevice
            _ = library.AOTInductorModelContainerRunSingleThreaded  # missed now, not by a run
        except (OSError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise AotiError(str(error)) from error
        handle = ctypes.c_void_p()
        status = create(ctypes.byref(handle), ctypes.c_size_t(1), device.encode(), None)
        if status != 0:
            raise AotiError(f"its model cannot be made on {device}")
        return cls(library, handle)

    def run(self, inputs: Sequence[int], stream: int | None) -> int:
        """Run the model on a CUDA stream (None: the default one).

        ``inputs``: AtenTensorHandles in the order of the package's inputs, which are gone when this returns.
        Returns the AtenTensorHandle of its one output, which belongs to the caller.

        Raises:
            AotiError: an operator failed; its message is on the standard error of the process.
        """
        return self.run_given((ctypes.c_void_p * len(inputs))(*inputs), stream)

    def run_given(self, given: "ctypes.Array[ctypes.c_void_p]", stream: int | None) -> int:
        """Runs the package as ``run`` does, with the handles in an array, which the caller may reuse."""
        output = ctypes.c_void_p()
        # Single-threaded: a variant with locks and events of its own breaks the capture of a CUDA graph.
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


SOURCES = Path(__file__).parent / "cpp"


def open_cpu_library(library: VerifiedFile) -> int:
    """The handle of the library, which stays mapped; packages that are opened ``standalone`` find it by its name.
    Raises AotiError if it cannot be loaded, or has changed since it was verified."""
    let_threads_sleep()
    open_libgomp()
    try:
        with library_file(library.read()) as name:
            return open_library(name)
    except OSError as error:
        raise AotiError(f"the CPU library cannot be opened: {error}") from error
