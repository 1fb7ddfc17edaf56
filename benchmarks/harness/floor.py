"""Measures the floor of every start: import torch, open the device, load the weights. No model runs.

    python -m snapcap.benchmarks.harness.floor --model FOLDER [--device cuda]

The weights are read in the plainest way: from safetensors to the device in the served precision, one tensor after
the other.
"""

from pathlib import Path

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.marks import mark, memory, result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    mark("interpreter")
    import torch

    mark("import_torch")
    torch.zeros(1, device=options.device)
    mark("device_init")
    from safetensors.torch import load_file

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    tensors = load_file(options.model / "model.safetensors")
    weights = [tensor.to(device=options.device, dtype=dtype) for tensor in tensors.values()]
    if options.device == "cuda":
        torch.cuda.synchronize()
    mark("load_weights")
    result({**memory(), "tensors": len(weights)})


if __name__ == "__main__":
    main()
