"""Device, precision and threads: chosen and set in one place, once, on the device thread."""

import os

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class StartError(RuntimeError):
    """A setting that this machine cannot fulfil; one line that says which."""


def choose_device(name: str) -> torch.device:
    """``auto`` is cuda where there is one, else the CPU.

    Raises:
        StartError: the device is not there.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartError(f"device {name}: this machine has no usable CUDA device; use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartError(f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on cuda and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def configure(device: torch.device, threads: int) -> None:
    """Grad mode, threads and precision for the calling thread, which becomes the device thread.

    Each of these is part of what a compiled graph was made for: nothing else may set them later. Matrix
    products stay in full fp32 ("highest"), so that tokens equal transformers'.
    """
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads or available_cpus())
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)


def available_cpus() -> int:
    """CPUs this process may use; in a container, what its affinity leaves."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
