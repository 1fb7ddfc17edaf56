"""Measures one caption without a server, from exec to exit: the command and the library, beside `import torch`.

    python -m snapcap.benchmarks.startup.offline [--model demo] [--device auto] [--buckets N,N,…] [--runs 7]
        [--cache FOLDER] [--json FILE]

Every run is a fresh process with fresh compiler caches and a warm page cache. The cases take turns. Artifacts and
prepared weights are made first. A wrong caption is an error, not a result.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from snapcap.benchmarks.harness.arguments import add_files, count, make_parser
from snapcap.benchmarks.harness.measurements import Samples, interleave
from snapcap.benchmarks.harness.workload import (
    FIRST_IMAGE,
    MODELS,
    ROOT,
    SNAPCAP,
    Workload,
    build_store,
    environment,
    fresh_caches,
    open_workload,
    scratch,
)
from snapcap.benchmarks.report.tables import Report, number, ratio

TORCH, COMMAND, LIBRARY = "import torch", "snapcap caption one.jpg", "Captioner(model)(image)"
CASES = (TORCH, COMMAND, LIBRARY)
TARGET = "≤ 0.5 ×"
_LIMIT_S = 120.0
_LIBRARY = """
import sys
from snapcap import Captioner
model, cache, device, buckets, image = sys.argv[1:]
with Captioner(model, cache_dir=cache, device=device, buckets=buckets) as captioner:
    print(captioner(image))
"""


def commands(model: Path, device: str, buckets: str, cache: Path, image: Path) -> dict[str, tuple[str, ...]]:
    """Returns the command of each case."""
    options = ("--model", str(model), "--cache-dir", str(cache), "--device", device, "--buckets", buckets)
    return {
        TORCH: (sys.executable, "-c", "import torch"),
        COMMAND: (*SNAPCAP, "caption", *options, str(image)),
        LIBRARY: (sys.executable, "-c", _LIBRARY, str(model), str(cache), device, buckets, str(image)),
    }


def run_once(command: Sequence[str], caption: str | None) -> Mapping[str, float]:
    """Runs one process and measures its seconds. ``caption`` is the text that it must print, if known.

    Raises:
        RuntimeError: it failed, or printed something else.
    """
    with scratch() as folder:
        extra = environment(**fresh_caches(folder))
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env=extra, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    if caption is not None and caption not in done.stdout:
        raise RuntimeError(f"a wrong caption: {done.stdout[:200]!r}")
    return {"seconds": seconds}


def measure(workload: Workload, device: str, buckets: str, cache: Path, runs: int) -> dict[str, Samples]:
    """Runs every case ``runs`` times, in turn. A first run, which does not count, brings files into the page
    cache."""
    with scratch() as folder:
        image = workload.write_images(folder) / FIRST_IMAGE
        expected = {TORCH: None, COMMAND: workload.first_image[1], LIBRARY: workload.first_image[1]}
        run: dict[str, Callable[[], Mapping[str, float]]] = {
            name: partial(run_once, command, expected[name])
            for name, command in commands(workload.folder, device, buckets, cache, image).items()
        }
        for once in run.values():
            once()
        return interleave(runs, run)


def report(results: Mapping[str, Samples]) -> Report:
    torch = results[TORCH].need("seconds") if TORCH in results else None
    rows = []
    for name, samples in results.items():
        seconds, values = samples.need("seconds"), samples.values["seconds"]
        target = "" if name == TORCH else TARGET
        row = [name, str(len(values)), number(seconds), number(min(values)), number(max(values))]
        rows.append([*row, ratio(seconds, torch), target])
    note = "Medians of alternating runs, each a fresh process, seconds from spawn to exit; min and max beside them."
    out = Report()
    out.add("One caption without a server", ["", "n", "s", "min", "max", "/torch", "target"], rows, note)
    return out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--buckets", default="auto", metavar="N,N,…", help="batch sizes of the artifact set")
    parser.add_argument("--runs", type=count, default=7, metavar="N")
    add_files(parser)
    options = parser.parse_args()
    with scratch(options.cache) as cache:
        workload = open_workload(options.model, cache)
        sets = cache / "sets" / workload.name
        given = ("--model", str(workload.folder), "--device", options.device, "--buckets", options.buckets)
        build_store(sets, *given)
        results = measure(workload, options.device, options.buckets, sets, options.runs)
    seconds = {name: samples.values for name, samples in results.items()}
    report(results).write(options.json, {"benchmark": "offline", "model": options.model, "seconds": seconds})


if __name__ == "__main__":
    main()
