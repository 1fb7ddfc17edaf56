"""Compiles a captioner in one way, in a process of its own, and marks each phase of its start.

    python -m snapcap.benchmarks.compile.case regional --model FOLDER --image FILE
        [--save FOLDER | --restore FOLDER]

Every bucket is compiled, and on a GPU captured as a CUDA graph, as in a server before it is ready. An encode and a
decode step are measured at each bucket, before and after the capture. `snapcap bench modes` runs this module.
"""

import shutil
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapcap.benchmarks.compile.steps import COMPONENTS, MODES, WAYS, CompiledSteps, How
from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.marks import mark, memory, result
from snapcap.benchmarks.harness.workload import open_model, start_options
from snapcap.warmup.option import parse_buckets

REPEATS = 30
TOKENS = 20


def first_steps(steps: CompiledSteps, buckets: tuple[int, ...]) -> dict[str, float]:
    """Runs every component and bucket for the first time, which compiles it. Returns seconds by component."""
    seconds = dict.fromkeys(COMPONENTS, 0.0)
    steps.begin()
    for size in buckets:
        for component in COMPONENTS:
            began = time.perf_counter()
            steps.run(component, size)
            seconds[component] += time.perf_counter() - began
            mark(f"compile_{component}")
    return {f"initial_{component}": value for component, value in seconds.items()}


def steady_steps(steps: CompiledSteps, buckets: tuple[int, ...], suffix: str = "") -> dict[str, float]:
    """Returns the median milliseconds of every component and bucket once compiled."""
    found = {}
    for component in COMPONENTS:
        for size in buckets:
            seconds = []
            for _ in range(REPEATS + 3):
                steps.begin()
                seconds.append(_timed(lambda c=component, s=size: steps.run(c, s))[0])  # type: ignore[misc]
            found[f"{component}_{size}{suffix}"] = statistics.median(seconds[3:]) * 1000
    return found


def needed(device: Any) -> dict[str, float]:
    """Returns the peaks of the process's memory so far, in MiB."""
    import torch

    peak = {"device_peak_mib": torch.cuda.max_memory_allocated() / (1 << 20)} if device.type == "cuda" else {}
    return {**memory(), **peak}


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    value = function()
    return time.perf_counter() - began, value


def capture(steps: CompiledSteps, buckets: tuple[int, ...]) -> None:
    for size in reversed(buckets):
        for component in COMPONENTS:
            steps.capture(component, size)
    mark("capture_graphs")


def restore(folder: Path, libraries: bool) -> None:
    """Reads the compiled code that another process saved. With ``libraries``, also reads the libraries that torch
    leaves out of its artifacts."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if libraries:
        with zipfile.ZipFile(folder / "libraries.zip") as archive:
            archive.extractall(cache_dir())
    torch.compiler.load_cache_artifacts((folder / "cache.bin").read_bytes())


def save(folder: Path) -> None:
    """Saves the compiled code, in the form of a jit artifact set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from snapcap.warmup.start.jit import CompileCache

    folder.mkdir(parents=True, exist_ok=True)
    for path in CompileCache(Path(cache_dir())).save().values():
        shutil.copy(path, folder)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--image", type=Path, required=True, help="the image to caption")
    parser.add_argument("--only", choices=COMPONENTS, help="leave the other component eager")
    parser.add_argument("--encoder-mode", choices=MODES, default="default")
    parser.add_argument("--decoder-mode", choices=MODES, default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of one operation; 0: the server's default"
    )
    parser.add_argument("--buckets", default="auto", help="batch sizes, such as 1,4")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save the compiled code to FOLDER at the end")
    parser.add_argument(
        "--restore",
        type=Path,
        metavar="FOLDER",
        help="restore the compiled code from FOLDER first; jit: with its libraries",
    )
    options = parser.parse_args()
    mark("interpreter")
    import torch

    mark("import_torch")
    buckets = parse_buckets(options.buckets)
    start = start_options(
        options.model, Path(), device=options.device, backend="eager", buckets=buckets, threads=options.threads
    )
    checkpoint, plan, model = open_model(start, mark)
    device, image = model.device, checkpoint.transform.decode(options.image.read_bytes()).pixels
    how = How(options.way, options.only, {"encoder": options.encoder_mode, "decoder": options.decoder_mode})
    if how.way != "eager":
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401

        mark("import_compiler")
    if options.restore:
        restore(options.restore, how.way == "jit")
        mark("restore")
    steps, buckets = CompiledSteps(model, device, image, how), plan.buckets
    values: dict[str, Any] = first_steps(steps, buckets)
    values |= needed(device)
    values |= steady_steps(steps, buckets)
    captures = device.type == "cuda" and not how.captures
    if captures:
        capture(steps, buckets)
    values["tokens"] = steps.caption(buckets[0], TOKENS)
    if captures:
        values |= steady_steps(steps, buckets, "_graph")
    if how.way != "eager":
        from snapcap.warmup.progress.status import cache_counts, compiled_graphs

        values |= {"graphs": compiled_graphs(), **cache_counts()._asdict()}
    result(values)
    if options.save:
        save(options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
