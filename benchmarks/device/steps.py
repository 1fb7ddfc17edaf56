"""Times one encode and one decode step at every bucket, compiled beside eager, in one process without HTTP.

    python -m snapcap.benchmarks.device.steps [--repeats 60] [--threads N] [--cache FOLDER] [--json FILE]

Both run through the runner that serves, on the same weights and with the threads a server uses, and take turns.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from snapcap.benchmarks.harness.arguments import add_files, make_parser
from snapcap.benchmarks.harness.common import DEMO, build_store, samples, scratch
from snapcap.benchmarks.harness.workload import open_model, start_options
from snapcap.benchmarks.report.tables import Report, number, ratio

LEAST_FASTER = 1.5


def measure(cache: Path, threads: int, repeats: int) -> tuple[dict[tuple[str, int, str], list[float]], int]:
    """Seconds by component, bucket and backend; and the threads they ran with."""
    from snapcap.models.processing.transform import ImageTransform
    from snapcap.warmup.plan.buckets import Bucket
    from snapcap.warmup.progress.status import COMPONENTS
    from snapcap.warmup.runtime.backends.aot import AotBackend
    from snapcap.warmup.runtime.backends.base import Backend
    from snapcap.warmup.runtime.backends.eager import EagerBackend
    from snapcap.warmup.runtime.runner import Runner, open_callables
    from snapcap.warmup.runtime.slot_request import SlotRequest
    from snapcap.warmup.start.preparation import find_artifacts

    options = start_options(DEMO, cache, device="cpu", backend="aot", threads=threads)
    checkpoint, plan, model = open_model(options)
    artifacts = find_artifacts(checkpoint.config, plan, options, "aot")
    if not artifacts.hit:
        raise SystemExit(f"no artifacts: {artifacts.fetched.reason}")
    backends: dict[str, Backend] = {
        "eager": EagerBackend(),
        "aot": AotBackend(artifacts.fetched.entries, artifacts.input_specs, model),
    }
    runners = {name: Runner(model.config, model.regions, model.weights, model.state).twin() for name in backends}
    transform: ImageTransform = checkpoint.transform
    images = [transform.decode(data).pixels for data, _ in samples().values()]

    def case(runner: Runner, component: str, bucket: Bucket) -> Callable[[], object]:
        if component == "encoder":
            batch = (images * bucket.size)[: bucket.size]
            return lambda: runner.encode(bucket, batch, 0)
        runner.admit(0, [SlotRequest()] * bucket.size)
        return lambda: runner.decode_step(bucket)

    seconds: dict[tuple[str, int, str], list[float]] = {}
    for component in COMPONENTS:
        for bucket in plan.table.buckets:
            cases: dict[str, Callable[[], object]] = {}
            for name, runner in runners.items():
                runner.bind(component, bucket, open_callables(model.regions, component, bucket, backends[name]))
                cases[name] = case(runner, component, bucket)
                for _ in range(3):
                    cases[name]()
            for _ in range(repeats):
                for name, run in cases.items():
                    started = time.perf_counter()
                    run()
                    seconds.setdefault((component, bucket.size, name), []).append(time.perf_counter() - started)
    return seconds, plan.threads


def report(seconds: dict[tuple[str, int, str], list[float]], threads: int) -> Report:
    rows = []
    for component, size in dict.fromkeys((component, size) for component, size, _ in seconds):
        eager, aot = (statistics.median(seconds[component, size, name]) * 1000 for name in ("eager", "aot"))
        target = f"≥ {LEAST_FASTER} ×" if component == "decoder" else "≥ 1 ×"
        what = "decode step" if component == "decoder" else "encode"
        rows.append([f"{what}, {size} rows", number(eager, 3), number(aot, 3), ratio(eager, aot), target])
    out = Report()
    count = len(next(iter(seconds.values())))
    note = f"medians of {count} alternating runs, {threads} thread(s)"
    out.add("Compiled beside eager", ["", "eager ms", "aot ms", "aot faster", "target"], rows, note)
    return out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0, help="0: as the server")
    add_files(parser)
    options = parser.parse_args()
    with scratch(options.cache) as cache:
        build_store(cache, "--device", "cpu", "--threads", str(options.threads))
        seconds, threads = measure(cache, options.threads, options.repeats)
    raw = {"samples": {f"{component} {size} {name}": v for (component, size, name), v in seconds.items()}}
    report(seconds, threads).write(options.json, raw)


if __name__ == "__main__":
    main()
