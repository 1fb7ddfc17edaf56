"""Measures the floor of every start: import torch, open the device, load the weights. No model runs.

    python -m snapcap.benchmarks.harness.floor cuda FOLDER

The weights are read in the plainest way: from safetensors to the device in the served precision, one tensor after
the other. Without the checkpoint's folder, the program ends after the import of torch.
"""

import sys
from pathlib import Path

from snapcap.benchmarks.harness.marks import mark, memory, result


def main(device: str, *folders: str) -> None:
    import torch

    mark("import_torch")
    for folder in folders:
        torch.zeros(1, device=device)
        mark("device_init")
        from safetensors.torch import load_file

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        tensors = load_file(Path(folder) / "model.safetensors")
        weights = [tensor.to(device=device, dtype=dtype) for tensor in tensors.values()]
        if device == "cuda":
            torch.cuda.synchronize()
        mark("load_weights")
        del weights
    result(memory())


if __name__ == "__main__":
    main(*sys.argv[1:])
