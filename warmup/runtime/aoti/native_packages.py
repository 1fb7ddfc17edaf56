"""Opens packages for tensors that are made without torch's Python module."""

import ctypes
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import field

from snapcap.models.dataclass import dataclass
from snapcap.models.regions.table import Region, RegionCall
from snapcap.warmup.runtime.aoti.container import AotiError, Container
from snapcap.warmup.runtime.aoti.libtorch import Libtorch
from snapcap.warmup.runtime.aoti.native_tensors import NativeTensor
from snapcap.warmup.runtime.aoti.packages import PackageError, region_of
from snapcap.warmup.store.blobs import VerifiedFile

_HANDLE_BYTES = ctypes.sizeof(ctypes.c_void_p)


@dataclass(frozen=True)
class NativePackages:
    """The `Packages` of tensors without torch, through the C interface.

    ``device``: "cpu", or as "cuda:0". ``stream``: of a GPU, that of the device thread. ``opening``: by entry, what
    another thread opens meanwhile. ``standalone``: ``libtorch`` is the CPU library in its place. ``threads``: of
    an operation on a CPU; ``lone_threads``: of one at a bucket of one row.
    """

    libtorch: Libtorch
    device: str = "cpu"
    stream: int | None = None
    opening: "Mapping[str, Future[Container]]" = field(default_factory=dict)
    standalone: bool = False
    threads: int | None = None
    lone_threads: int | None = None

    def open(self, entry: str, package: VerifiedFile) -> RegionCall:
        try:
            future = self.opening.get(entry)
            container = self._opened(package) if future is None else future.result()
        except AotiError as error:
            raise PackageError(f"{entry} cannot be opened: {error}") from error
        if self.lone_threads == self.threads:  # the number is set already
            return self.function(container)
        return self.function(container, self.lone_threads if region_of(entry)[1] == 1 else self.threads)

    def function(self, container: Container, threads: int | None = None) -> RegionCall:
        """Wraps a container as a function of its inputs. The inputs stay the caller's, while a container's ``run``
        takes them over. ``threads``: number of threads to set before a call; None leaves the number as it is.

        Raises:
            AotiError: it fails when it is called.
        """
        libtorch, duplicate, stream = self.libtorch, self.libtorch.duplicate, self.stream

        def call(*inputs: NativeTensor) -> NativeTensor:
            if threads is not None:
                libtorch.set_num_threads(threads)
            given = (ctypes.c_void_p * len(inputs))()
            place = ctypes.addressof(given)
            for tensor in inputs:
                if duplicate(tensor.handle, place) != 0:
                    raise AotiError("an input cannot be handed over")
                place += _HANDLE_BYTES
            return NativeTensor(libtorch, container.run_given(given, stream))

        return call

    def eager(self, region: Region) -> RegionCall:
        """torch's module is imported for it: late, but nobody's request is lost."""
        import torch  # noqa: PLC0415

        from snapcap.warmup.runtime.aoti import tensors  # noqa: PLC0415

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        function, libtorch = region.function, self.libtorch

        def on_host(*inputs: NativeTensor) -> NativeTensor:
            return tensors.over_tensor(libtorch, function(*map(tensors.tensor_over, inputs)))

        def on_gpu(*inputs: NativeTensor) -> NativeTensor:
            handles = [libtorch.another(tensor.handle) for tensor in inputs]
            return NativeTensor(libtorch, tensors.handle_of(function(*map(tensors.tensor_of, handles))))

        return on_host if self.stream is None else on_gpu

    def _opened(self, package: VerifiedFile) -> Container:
        return Container.open(package, self.device, self.standalone)
