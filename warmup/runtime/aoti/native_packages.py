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
from snapcap.warmup.runtime.aoti.packages import PackageError
from snapcap.warmup.store.blobs import VerifiedFile

_HANDLE_BYTES = ctypes.sizeof(ctypes.c_void_p)


@dataclass(frozen=True)
class NativePackages:
    """The `Packages` of tensors without torch, through the C interface.

    ``device``: "cpu", or as "cuda:0". ``stream``: of a GPU, that of the device thread. ``opening``: by entry, what
    another thread opens meanwhile.
    """

    libtorch: Libtorch
    device: str = "cpu"
    stream: int | None = None
    opening: "Mapping[str, Future[Container]]" = field(default_factory=dict)

    def open(self, entry: str, package: VerifiedFile) -> RegionCall:
        try:
            future = self.opening.get(entry)
            container = Container.open(package, self.device) if future is None else future.result()
        except AotiError as error:
            raise PackageError(f"{entry} cannot be opened: {error}") from error
        return self.function(container)

    def function(self, container: Container) -> RegionCall:
        """What a package does, as a function of its inputs. They stay the caller's, unlike those of a container.

        Raises:
            AotiError: it fails when it is called.
        """
        libtorch, duplicate, stream = self.libtorch, self.libtorch.duplicate, self.stream

        def call(*inputs: NativeTensor) -> NativeTensor:
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
        from snapcap.warmup.runtime.aoti.tensors import handle_of, tensor_of  # noqa: PLC0415

        function = region.function

        def call(*inputs: NativeTensor) -> NativeTensor:
            output = function(*(tensor_of(self.libtorch.another(tensor.handle)) for tensor in inputs))
            return NativeTensor(self.libtorch, handle_of(output))

        return call
