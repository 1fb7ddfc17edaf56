"""Times what a start calls `load_weights` with a checkpoint that is converted, and with its prepared weights.

    python -m snapcap.benchmarks.device.prepared_weights [--model vit-b16-gpt2] [--dtype float32] [--runs 5]

On the CPU. Each is a process of its own that has torch, and both files are in the page cache; they take turns. A
file that is mapped is read when it is used, so every tensor is then read once, as the first request does it. The
memory is told that the process then has more: its own, and a file's pages, which all processes share.
"""

import argparse
import hashlib
import statistics
import sys
import time
from pathlib import Path

from snapcap.benchmarks.harness.arguments import add_files, count, make_parser
from snapcap.benchmarks.harness.common import run_child, scratch
from snapcap.benchmarks.harness.marks import read_result, result
from snapcap.benchmarks.harness.workload import MODELS, open_workload, start_options
from snapcap.benchmarks.report.tables import Report, number, ratio
from snapcap.warmup.options import StartOptions

WAYS = {"checkpoint": "a checkpoint, converted", "prepared": "prepared weights, mapped"}


def options_of(folder: Path, cache: Path, dtype: str) -> StartOptions:
    return start_options(folder, cache, device="cpu", dtype=dtype, backend="eager", buckets=(1,))


def load(way: str, options: StartOptions) -> None:
    """One load in this process; prints the seconds of finding, loading and reading once, and bytes of memory."""
    import torch

    from snapcap.models.weights.load import Normalisation, load_weights, weight_bytes
    from snapcap.models.weights.prepared.tensors import prepared_weights
    from snapcap.warmup.plan.plan import make_plan
    from snapcap.warmup.start.preparation import read_checkpoint
    from snapcap.warmup.weights.find import find_weights

    torch.set_grad_enabled(False)
    checkpoint = read_checkpoint(options)
    plan, cpu = make_plan(checkpoint.config, options), torch.device("cpu")
    transform, dtype = checkpoint.transform, getattr(torch, plan.dtype)
    pixels = Normalisation(transform.effective_rescale, transform.effective_mean, transform.effective_std)
    before = memory()
    began = time.perf_counter()
    found = find_weights(checkpoint, plan, options.store_folder)
    looked = time.perf_counter()
    if way == "checkpoint":
        weights = load_weights(checkpoint.folder, checkpoint.config, pixels, cpu, dtype)
    else:
        if found.mapped is None:
            raise SystemExit(f"no prepared weights: {found.reason}")
        weights = prepared_weights(found.mapped, cpu)
    loaded = time.perf_counter()
    for layers in weights.sets.values():
        for tensor in (tensor for layer in layers for tensor in layer):
            tensor.sum()
    read = time.perf_counter()
    grown = {name: size - before[name] for name, size in memory().items()}
    result(
        {
            "find": looked - began,
            "load": loaded - looked,
            "read": read - looked,
            "nbytes": weight_bytes(weights),
            **grown,
        }
    )


def memory() -> dict[str, int]:
    """Bytes of this process: RssAnon, which is its own, and RssFile, which are pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


def prepare(options: StartOptions) -> float:
    """Write the prepared weights as a server does; returns the seconds of it."""
    from snapcap.warmup.plan.plan import make_plan
    from snapcap.warmup.start.preparation import read_checkpoint
    from snapcap.warmup.weights.worker import prepare_in_worker, weights_worker

    checkpoint = read_checkpoint(options)
    plan = make_plan(checkpoint.config, options)
    began = time.perf_counter()
    prepared = prepare_in_worker(weights_worker(checkpoint.folder, plan, options), thorough=False)
    if prepared.result not in ("written", "kept"):
        raise SystemExit(f"no prepared weights: {prepared.reason}")
    return time.perf_counter() - began


def hash_rate(store: Path) -> float:
    """Bytes a second of SHA-256, of one thread and a file in the page cache: what verifying a file would take."""
    (file,) = list((store / "weights").glob("*.safetensors"))[:1]
    began = time.perf_counter()
    with file.open("rb") as opened:
        hashlib.file_digest(opened, "sha256")
    return file.stat().st_size / (time.perf_counter() - began)


def measure(model: Path, cache: Path, dtype: str, runs: int) -> dict[str, list[dict[str, float]]]:
    """Results by way, in turns; a first one of each is not counted."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    program = (sys.executable, "-m", "snapcap.benchmarks.device.prepared_weights")
    for turn in range(runs + 1):
        for way, results in found.items():
            command = [*program, "--dtype", dtype, "--child", way, str(model), str(cache)]
            measured = read_result(run_child(command, way))
            if turn:
                results.append(measured)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="vit-b16-gpt2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runs", type=count, default=5, help="of each way (default: %(default)s)")
    add_files(parser)
    parser.add_argument("--child", nargs=3, metavar=("WAY", "MODEL", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, model, cache = options.child
        load(way, options_of(Path(model), Path(cache), options.dtype))
        return
    with scratch(options.cache) as folder:
        model, cache = open_workload(options.model, folder).folder, folder / "prepared"
        start = options_of(model, cache, options.dtype)
        writing = prepare(start)
        found = measure(model, cache, options.dtype, options.runs)
        rate = hash_rate(start.store_folder)
    medians = {
        way: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for way, runs in found.items()
    }
    slow = medians["checkpoint"]
    rows = [
        [
            WAYS[way],
            number(one["find"] * 1000, 1),
            number(one["load"] * 1000, 1),
            ratio(slow["load"], one["load"]),
            number(one["read"] * 1000, 1),
            ratio(slow["read"], one["read"]),
            number(one["RssAnon"] / (1 << 20), 0),
            number(one["RssFile"] / (1 << 20), 0),
        ]
        for way, one in medians.items()
    ]
    columns = ["", "find, ms", "load, ms", "faster", "and read once, ms", "faster", "own MiB", "MiB of files"]
    size = medians["prepared"]["nbytes"]
    notes = (
        f"medians of {options.runs} processes, in turns; {size / (1 << 20):.0f} MiB of {options.dtype}; writing "
        f"them took {writing:.1f} s, once; their SHA-256, which no start takes, would take {size / rate:.1f} s"
    )
    report = Report()
    report.add("Weights of a start", columns, rows, notes)
    report.write(options.json, {"runs": found, "hash_rate": rate, "writing": writing})


if __name__ == "__main__":
    main()
