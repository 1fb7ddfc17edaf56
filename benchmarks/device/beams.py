"""Times a decode step of one image's b beams beside one of b greedy rows, in the same bucket and process.

    python -m snapcap.benchmarks.device.beams [--model demo] [--backend aot|eager] [--device auto] [--buckets 4,8]
        [--json FILE]

Both run through the runner that serves, on CUDA as the graphs that serve, and take turns. Then the tokens of some
searches are compared with those of steps launched operation by operation: with the callables that were measured
they must be equal; with eager ones, in 16 bits, the rounding of compiled regions may change some.
"""

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapcap.benchmarks.harness.arguments import add_files, make_parser
from snapcap.benchmarks.harness.common import build_store, scratch
from snapcap.benchmarks.harness.workload import MODELS, Workload, open_workload, start_options
from snapcap.benchmarks.report.tables import Report, number
from snapcap.warmup.option import parse_buckets

if TYPE_CHECKING:
    from snapcap.warmup.plan.buckets import Bucket
    from snapcap.warmup.runtime.runner import Runner
    from snapcap.warmup.runtime.slot_request import Needs
    from snapcap.warmup.start.started import StartedModel

BEAMS = (2, 3, 4, 5, 8)
MOST = 1.3
STEPS = 16
CHECKED_TOKENS = 16


def start(workload: Workload, options: argparse.Namespace, cache: Path) -> "StartedModel":
    """The model as a server has it when it is ready."""
    from snapcap.warmup.progress.status import StartupStatus
    from snapcap.warmup.progress.timeline import Timeline
    from snapcap.warmup.start.start import load

    if options.backend == "aot":
        chosen = ("--buckets", ",".join(map(str, options.buckets))) if options.buckets else ()
        build_store(cache, "--model", str(workload.folder), "--device", options.device, *chosen)
    given = start_options(
        workload.folder, cache, device=options.device, backend=options.backend, buckets=options.buckets, strict=True
    )
    return load(given, Timeline.since_exec(), StartupStatus())


def admit(runner: "Runner[Any]", bucket: "Bucket", beams: int, image: Any, search: bool) -> "Needs":
    """The first b slots: one image's beams, or as many greedy rows. The image is encoded for both, as that leaves
    the CPU's caches without what a step reads."""
    from snapcap.warmup.runtime.slot_request import GREEDY, Needs, SamplingParams, SlotRequest

    runner.encode(bucket, [image], 0)
    if not search:
        runner.admit(0, [SlotRequest()] * beams)
        return GREEDY
    room = runner.state.cache_length - 1
    row = SlotRequest(params=SamplingParams(num_beams=beams, early_stopping="never"), new_tokens=room)
    runner.admit(0, [row])
    runner.group(range(beams), row)
    return Needs(beams=True)


def milliseconds(runner: "Runner[Any]", bucket: "Bucket", needs: "Needs") -> float:
    """Of one of the next steps; what is read after each is copied as when serving."""
    timer = runner.timer()
    for _ in range(STEPS):
        runner.decode_step(bucket, needs)
        runner.read_tokens(bucket.size, needs.beams)
    return timer.stop().seconds() * 1000 / STEPS


def measure(loaded: "StartedModel", image: Any, repeats: int) -> dict[int, dict[str, list[float]]]:
    """Milliseconds by number of beams, of beams and of greedy rows."""
    runner, table = loaded.runner, loaded.plan.table
    found: dict[int, dict[str, list[float]]] = {}
    for beams in (each for each in BEAMS if each <= table.largest.size):
        bucket = table.fit(beams)
        samples = found[beams] = {"greedy": [], "beams": []}
        for repeat in range(repeats + 3):
            for name, series in samples.items():
                needs = admit(runner, bucket, beams, image, name == "beams")
                spent = milliseconds(runner, bucket, needs)
                if repeat >= 3:
                    series.append(spent)
    return found


def searched(runner: "Runner[Any]", bucket: "Bucket", beams: int, image: Any) -> list[int]:
    """The best hypothesis."""
    from snapcap.warmup.runtime.slot_request import SamplingParams, SlotRequest

    row = SlotRequest(params=SamplingParams(num_beams=beams), new_tokens=CHECKED_TOKENS)
    runner.encode(bucket, [image], 0)
    runner.admit(0, [row])
    runner.group(range(beams), row)
    from snapcap.warmup.runtime.slot_request import Needs

    for _ in range(CHECKED_TOKENS):
        runner.decode_step(bucket, Needs(beams=True))
        ended = runner.read_tokens(beams, beams=True).hypotheses()
        if ended:
            return ended[0]
    raise RuntimeError("a search did not end")


def compare(loaded: "StartedModel", images: list[Any]) -> list[list[str]]:
    """How many searches give the same tokens launched by hand, and with eager regions."""
    from snapcap.warmup.progress.status import COMPONENTS
    from snapcap.warmup.runtime.backends.eager import EagerBackend
    from snapcap.warmup.runtime.runner import open_callables

    runner, table = loaded.runner, loaded.plan.table
    rows = []
    for beams in (each for each in BEAMS if each <= table.largest.size):
        bucket = table.fit(beams)
        served = [searched(runner, bucket, beams, image) for image in images]
        row = [f"{beams} beams, bucket {bucket.size}"]
        for eager in (False, True):
            twin = runner.twin()
            for component in COMPONENTS:
                own = runner.bound(component, bucket)
                plain = open_callables(runner.regions, component, bucket, EagerBackend())
                twin.bind(component, bucket, plain if eager else own)
            same = sum(
                searched(twin, bucket, beams, image) == tokens for image, tokens in zip(images, served, strict=True)
            )
            row.append(f"{same} of {len(images)}")
        rows.append(row)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--backend", choices=("aot", "eager"), default="aot")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--buckets", type=parse_buckets, default="auto", help="as of `snapcap serve`")
    parser.add_argument("--repeats", type=int, default=40)
    add_files(parser)
    options = parser.parse_args()
    report = Report()
    with scratch(options.cache) as cache:
        workload = open_workload(options.model, cache)
        loaded = start(workload, options, cache)
        images = [loaded.checkpoint.transform.decode(data).pixels for data, _ in workload.images.values()]
        samples = measure(loaded, images[0], options.repeats)
        equal = compare(loaded, images)
    rows = []
    for beams, series in samples.items():
        greedy, search = (statistics.median(series[name]) for name in ("greedy", "beams"))
        bucket = loaded.plan.table.fit(beams).size
        rows.append(
            [
                f"{beams} rows, bucket {bucket}",
                number(greedy, 3),
                number(search, 3),
                f"{search / greedy:.2f} ×",
                f"≤ {MOST} ×",
            ]
        )
    note = (
        f"medians of {options.repeats} alternating series of {STEPS} steps; {loaded.plan.device}, {options.backend}"
    )
    report.add(
        f"Beams beside greedy rows, {options.model}", ["", "greedy ms", "beams ms", "ratio", "target"], rows, note
    )
    report.add("Searches with the same tokens", ["", "without graphs", "eager regions"], equal)
    report.write(options.json, {"samples": samples})


if __name__ == "__main__":
    main()
