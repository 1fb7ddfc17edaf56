"""Sets torch's device, precision and threads, in one place, once, on the thread that will run the regions."""

import torch
from torch import Tensor

from snapcap.models.memory.torch_memory import TorchHostMemory
from snapcap.warmup.errors import StartError
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.runtime.devices.cpu import CpuDevice
from snapcap.warmup.runtime.devices.cuda import CudaDevice
from snapcap.warmup.runtime.devices.device import Device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_device(plan: Plan) -> tuple[torch.device, torch.dtype]:
    """The plan's device and dtype, with grad mode, threads and precision set for the calling thread.

    Each of these is part of what a compiled graph was made for: nothing else may set them later. Matrix products
    stay in full fp32 ("highest"), so that tokens equal transformers'.

    Raises:
        StartError: torch cannot use the device that the driver shows.
    """
    device = torch.device(plan.device)
    torch.set_grad_enabled(False)
    torch.set_num_threads(plan.threads)
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartError(f"device {plan.device}: torch has no usable CUDA device here; use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartError(f"device {plan.device}: this machine has {torch.cuda.device_count()} CUDA devices")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device, DTYPES[plan.dtype]


def avoid_driver_compilation() -> None:
    """Keep torch from choosing kernels that the driver compiles at their first launch.

    cuDNN ships its attention as PTX. In a new container the driver has no cache yet and compiles it: 0.4 s of the
    first caption on an H200. Torch's other kernels are binaries for this processor. The setting is for eager region
    functions: a package's kernels were chosen by its build, and `torch.compile` should choose the fastest.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def torch_device(device: torch.device) -> Device[Tensor]:
    """Returns the device for a runner over torch's tensors."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice(TorchHostMemory())
