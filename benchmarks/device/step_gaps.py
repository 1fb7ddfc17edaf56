"""Measures how long a CUDA device waits between one decode step and the next, while the engine runs.

    python -m snapcap.benchmarks.device.step_gaps [--model vit-b16-gpt2] [--rows 1,4,16,64] [--backend aot]
        [--cache FOLDER]

The engine that serves captions as many images at once as there are rows, again and again, with an event of the
device before and behind every decode step that it launches. A gap is the time from the end of a step to the
beginning of the next, with nothing else between them: what the host costs the device. "Read behind" is how the
engine works: it launches a step before it reads the tokens of the last. "Read first" is the same engine made to
wait for them.

Events see the launch, not the kernels. So the last columns say it once more without them: the time from the end of
a step to the end of the next, beside that of a step replayed back to back with nothing between.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

from snapcap.benchmarks.device.kernels import milliseconds
from snapcap.benchmarks.harness.arguments import add_files, count, counts, make_parser, require_cuda
from snapcap.benchmarks.harness.common import build_store, scratch
from snapcap.benchmarks.harness.measurements import percentile
from snapcap.benchmarks.harness.random_checkpoint import RANDOM_MODELS
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.load.engine import Opened, ask, captioned_right, open_engine
from snapcap.benchmarks.report.tables import Report, number

if TYPE_CHECKING:
    from concurrent.futures import Future

    from snapcap.warmup.runtime.runner import Runner


class Event(Protocol):
    """A moment in the device's work; ``elapsed_time`` gives the milliseconds from it to a later one."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


@dataclass
class Steps:
    """The engine's decode steps in the order of their launch, as (begin, end); None stands for an encode."""

    event: Callable[[], Event]
    marks: list[tuple[Event, Event] | None] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self, runner: "Runner[Any]") -> Iterator[None]:
        """Of everything that this runner is asked to launch meanwhile."""
        encode, step = runner.encode, runner.decode_step

        def watched_encode(*arguments: Any, **more: Any) -> Any:
            self.marks.append(None)
            return encode(*arguments, **more)

        def watched_step(*arguments: Any) -> Any:
            begin, end = self.event(), self.event()
            begin.record()
            logits = step(*arguments)
            end.record()
            self.marks.append((begin, end))
            return logits

        with (
            mock.patch.object(runner, "encode", watched_encode),
            mock.patch.object(runner, "decode_step", watched_step),
        ):
            yield

    def gaps(self) -> "Gaps":
        """Call it when the device has done all of it."""
        found = Gaps()
        for last, mark in zip([None, *self.marks], self.marks, strict=False):
            if mark is None:
                continue
            found.steps.append(mark[0].elapsed_time(mark[1]))
            if last is not None:
                found.gaps.append(last[1].elapsed_time(mark[0]))
                found.periods.append(last[1].elapsed_time(mark[1]))
        return found


@dataclass
class Gaps:
    """Milliseconds: of each step, from one's end to the next one's beginning, and to the next one's end."""

    steps: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    periods: list[float] = field(default_factory=list)
    alone: float = 0.0

    @property
    def idle(self) -> float:
        """The share of the time in which the device waited."""
        return sum(self.gaps) / sum(self.periods)


def measure(opened: Opened, images: list[Any], rows: int, rounds: int, event: Callable[[], Event]) -> Gaps:
    """Caption ``rows`` images together, ``rounds`` times; the first round is not counted."""
    runner, engine = opened.loaded.runner, opened.engine
    watched = Steps(event)

    def together() -> "list[Future[Any]]":
        return [ask(opened, images, turn) for turn in range(rows)]

    for turn in range(rounds + 1):
        with watched.watch(runner) if turn else contextlib.nullcontext():
            # Asked on the device thread, between two steps: all are admitted at once, and end at once.
            for future in engine.call(together).result():
                future.result()
            engine.call(runner.device.wait).result()
    return watched.gaps()


def alone(opened: Opened, rows: int) -> float:
    """Milliseconds of a step's graph, replayed back to back."""
    runner = opened.loaded.runner
    replay = runner.replay("decoder", opened.loaded.plan.table.fit(rows))
    return float(opened.engine.call(lambda: milliseconds(replay, runner.timer)).result())


def row(name: str, found: Gaps) -> list[str]:
    gaps = sorted(found.gaps)
    shares = [number(percentile(gaps, share) * 1000, 1) for share in (0.5, 0.99, 1.0)]
    return [
        name,
        number(percentile(sorted(found.steps), 0.5), 3),
        *shares,
        number(found.idle * 100, 1),
        number(percentile(sorted(found.periods), 0.5), 3),
        number(found.alone, 3),
        str(len(gaps)),
    ]


def report(found: dict[tuple[int, str], Gaps]) -> Report:
    out = Report()
    columns = ["", "step ms", "gap µs p50", "p99", "max", "idle %", "end to end ms", "alone ms", "gaps"]
    rows = [row(f"{rows} rows, {way}", gaps) for (rows, way), gaps in found.items()]
    note = "step, end to end: p50; idle: share of the time from the first step's end to the last one's"
    out.add("Between two decode steps", columns, rows, note)
    return out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=tuple(RANDOM_MODELS), default="vit-b16-gpt2")
    parser.add_argument("--rows", type=counts, default="1,4,16,64", help="as 1,64 (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=20, help="captions of each row (default: %(default)s)")
    parser.add_argument("--backend", choices=("aot", "eager"), default="aot")
    add_files(parser)
    options = parser.parse_args()
    from snapcap.warmup.runtime.devices.cuda import event
    from snapcap.warmup.runtime.runner import Runner

    require_cuda("device.step_gaps", "a CPU works on the thread that launches")
    buckets = ",".join(map(str, options.rows))
    found: dict[tuple[int, str], Gaps] = {}
    with scratch(options.cache) as cache:
        workload = open_workload(options.model, cache)
        if options.backend == "aot":
            build_store(cache, "--model", str(workload.folder), "--buckets", buckets)
        serving = argparse.Namespace(
            model=workload.folder, cache=cache, device="cuda", backend=options.backend, buckets=buckets, threads=0
        )
        with contextlib.closing(open_engine(serving)) as opened:
            images = captioned_right(opened, list(workload.images.values()))
            for rows in options.rows:
                for way, ahead in (("read behind", True), ("read first", False)):
                    with mock.patch.object(Runner, "runs_ahead", ahead):
                        gaps = measure(opened, images, rows, options.rounds, lambda: event(timing=True))
                    gaps.alone = alone(opened, rows)
                    found[rows, way] = gaps
    raw = {f"{rows} {way}": vars(gaps) for (rows, way), gaps in found.items()}
    report(found).write(options.json, {"runs": raw})


if __name__ == "__main__":
    main()
