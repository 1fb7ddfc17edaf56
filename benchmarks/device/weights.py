"""Times the way of a checkpoint's weights from a file in the page cache to a CUDA device.

    python -m snapcap.benchmarks.device.weights [--model vit-b16-gpt2] [--runs 5]

Each is a process of its own, whose device is open: what a start calls `load_weights`, through pinned memory as it
is, and with every tensor copied from the file's own pages; and beside them the plainest way, safetensors to the
device one tensor after the other, which is the floor that starts are compared with.
"""

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

from snapcap.benchmarks.harness.arguments import add_files, count, make_parser, require_cuda
from snapcap.benchmarks.harness.common import run_child, scratch
from snapcap.benchmarks.harness.marks import read_result, result
from snapcap.benchmarks.harness.workload import MODELS, open_workload
from snapcap.benchmarks.report.tables import Report, number, ratio

WAYS = {
    "plain": "one tensor after the other, as they are",
    "pageable": "regions' weights, from the file's pages",
    "pinned": "regions' weights, through pinned memory",
}


def load(way: str, folder: Path) -> None:
    """One load in this process; prints its seconds, and the bytes of the file and on the device."""
    import torch
    from safetensors.torch import load_file

    from snapcap.models.config import ModelConfig
    from snapcap.models.processing.transform import ImageTransform
    from snapcap.models.weights.listing import weight_files
    from snapcap.models.weights.load import Normalisation, load_weights

    device = torch.device("cuda", 0)
    torch.set_grad_enabled(False)
    torch.zeros(1, device=device)
    config = ModelConfig.from_folder(folder)
    transform = ImageTransform.from_folder(folder, config.vision.image_size, family=config.vision.family)
    normalisation = Normalisation(transform.effective_rescale, transform.effective_mean, transform.effective_std)

    def plain() -> object:
        tensors = (tensor for file in weight_files(folder) for tensor in load_file(file).values())
        return [tensor.to(device=device, dtype=torch.bfloat16) for tensor in tensors]

    def regions() -> object:
        return load_weights(folder, config, normalisation, device, torch.bfloat16)

    unchanged = mock.patch("snapcap.models.weights.load.upload", lambda tensors, _device: dict(tensors))
    with unchanged if way == "pageable" else contextlib.nullcontext():
        torch.cuda.synchronize()
        began = time.perf_counter()
        kept = plain() if way == "plain" else regions()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    size = sum(file.stat().st_size for file in weight_files(folder))
    peak = torch.cuda.max_memory_allocated()
    result({"seconds": seconds, "file": size, "device": torch.cuda.memory_allocated(), "peak": peak})
    del kept


def measure(folder: Path, runs: int) -> dict[str, list[dict[str, float]]]:
    """Results by way, in turns; a first one of each is not counted."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(runs + 1):
        for way, results in found.items():
            command = [sys.executable, "-m", "snapcap.benchmarks.device.weights", "--child", way, str(folder)]
            measured = read_result(run_child(command, way))
            if turn:
                results.append(measured)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="vit-b16-gpt2")
    parser.add_argument("--runs", type=count, default=5, help="of each way (default: %(default)s)")
    add_files(parser)
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        load(options.child[0], Path(options.child[1]))
        return
    require_cuda("device.weights", "on a CPU weights stay in the file's own pages")
    with scratch(options.cache) as folder:
        found = measure(open_workload(options.model, folder).folder, options.runs)
    medians = {way: statistics.median(run["seconds"] for run in runs) for way, runs in found.items()}
    rows = []
    for way, runs in found.items():
        seconds, one = medians[way], runs[0]
        rows.append(
            [
                WAYS[way],
                number(seconds * 1000, 1),
                number(one["file"] / seconds / 1e9, 1),
                ratio(medians["pageable"], seconds),
                number(one["device"] / (1 << 20), 0),
                number(one["peak"] / (1 << 20), 0),
            ]
        )
    report = Report()
    columns = ["", "ms", "GB/s of the file", "faster than from pages", "MiB on the device", "at most"]
    report.add("Weights to the device", columns, rows, f"medians of {options.runs} processes, in turns")
    report.write(options.json, {"runs": found})


if __name__ == "__main__":
    main()
