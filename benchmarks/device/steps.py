"""Times an encode and the kinds of decode step at every bucket, compiled beside eager, in one process, no HTTP.

    python -m snapcap.benchmarks.device.steps [--repeats 60] [--threads N] [--cache FOLDER] [--json FILE]

Both run through the runner that serves, on the same weights and with the threads a server uses, and take turns.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapcap.benchmarks.harness.arguments import add_files, make_parser
from snapcap.benchmarks.harness.common import DEMO, build_store, samples, scratch
from snapcap.benchmarks.harness.workload import open_model, start_options
from snapcap.benchmarks.report.tables import Report, number, ratio

if TYPE_CHECKING:
    from snapcap.models.regions.table import Component

LEAST_FASTER = 1.5
WORK: "Mapping[str, Component]" = {
    "encode": "encoder",
    "decode step": "decoder",
    "sampled step": "decoder",
    "penalised step": "decoder",
}


def measure(cache: Path, threads: int, repeats: int) -> tuple[dict[tuple[str, int, str], list[float]], int]:
    """Seconds by kind of work, bucket and backend; and the threads they ran with."""
    from snapcap.models.processing.transform import ImageTransform
    from snapcap.warmup.plan.buckets import Bucket
    from snapcap.warmup.runtime.aoti.torch_packages import torch_backend
    from snapcap.warmup.runtime.backends.base import Backend
    from snapcap.warmup.runtime.backends.eager import EagerBackend
    from snapcap.warmup.runtime.devices.torch_settings import torch_device
    from snapcap.warmup.runtime.runner import Runner, open_callables
    from snapcap.warmup.runtime.slot_request import Needs, SamplingParams, SlotRequest
    from snapcap.warmup.start.preparation import find_artifacts

    options = start_options(DEMO, cache, device="cpu", backend="aot", threads=threads)
    checkpoint, plan, model = open_model(options)
    artifacts = find_artifacts(checkpoint.config, plan, options, "aot")
    if not artifacts.hit:
        raise SystemExit(f"no artifacts: {artifacts.fetched.reason}")
    backends: dict[str, Backend] = {
        "eager": EagerBackend(),
        "aot": torch_backend(artifacts.fetched.entries, artifacts.input_specs, model),
    }
    runners = {name: Runner(model, torch_device(model.device)).twin() for name in backends}
    transform: ImageTransform = checkpoint.transform
    images = [transform.decode(data).pixels for data, _ in samples().values()]

    def case(runner: Runner[Any], what: str, bucket: Bucket) -> Callable[[], object]:
        if what == "encode":
            batch = (images * bucket.size)[: bucket.size]
            return lambda: runner.encode(bucket, batch, 0)
        params = SamplingParams(
            temperature=0.8 if what == "sampled step" else 0.0,
            repetition_penalty=1.2 if what == "penalised step" else 1.0,
        )
        uniforms = [0.5] * model.state.cache_length
        runner.admit(0, [SlotRequest(params=params, uniforms=uniforms)] * bucket.size)
        needs = Needs(params.samples, params.penalised)
        return lambda: runner.decode_step(bucket, needs)

    seconds: dict[tuple[str, int, str], list[float]] = {}
    for what, component in WORK.items():
        for bucket in plan.table.buckets:
            cases: dict[str, Callable[[], object]] = {}
            for name, runner in runners.items():
                runner.bind(component, bucket, open_callables(model.regions, component, bucket, backends[name]))
                cases[name] = case(runner, what, bucket)
                for _ in range(3):
                    cases[name]()
            for _ in range(repeats):
                for name, run in cases.items():
                    started = time.perf_counter()
                    run()
                    seconds.setdefault((what, bucket.size, name), []).append(time.perf_counter() - started)
    return seconds, plan.threads


def report(seconds: dict[tuple[str, int, str], list[float]], threads: int) -> Report:
    rows = []
    for what, size in dict.fromkeys((what, size) for what, size, _ in seconds):
        eager, aot = (statistics.median(seconds[what, size, name]) * 1000 for name in ("eager", "aot"))
        target = f"≥ {LEAST_FASTER} ×" if what == "decode step" else "≥ 1 ×"
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
    raw = {"samples": {f"{what} {size} {name}": v for (what, size, name), v in seconds.items()}}
    report(seconds, threads).write(options.json, raw)


if __name__ == "__main__":
    main()
