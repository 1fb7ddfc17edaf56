"""Measures captions/s of a folder beside those of the engine alone, in one process, in turn.

    python -m snapcap.benchmarks.load.folder [--model demo] [--backend eager] [--rounds 5]
        [--seconds 6] [--cache FOLDER]

The folder is what `snapcap caption FOLDER --output FILE` does once the model is ready: find, read and decode JPEGs,
caption, write. The engine gets images that are decoded already, as many under way as the folder has, in a closed
loop before and after each folder. Exits 1 where a caption is wrong or the folder is below 0.9 of the engine.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from snapcap.benchmarks.harness.arguments import add_files, make_parser
from snapcap.benchmarks.harness.common import scratch
from snapcap.benchmarks.harness.workload import MODELS, Workload, open_workload
from snapcap.benchmarks.load.engine import Opened, ask, captioned_right, closed_loop, open_engine
from snapcap.benchmarks.report.tables import Report, number

LEAST = 0.9


def make_folder(workload: Workload, folder: Path, count: int) -> dict[str, str | None]:
    """``count`` files with the workload's images in turn; returns the caption that each must get."""
    folder.mkdir()
    names = sorted(workload.images)
    originals = workload.write_images(folder.with_name(f"{folder.name}-originals"))
    expected = {}
    for index in range(count):
        source = names[index % len(names)]
        name = f"{index:06}.jpg"
        os.link(originals / source, folder / name)
        expected[name] = workload.images[source][1]
    return expected


def caption_folder(opened: Opened, folder: Path, output: Path, threads: int) -> float:
    """Images a second, from the first look at the folder to the last line.

    Raises:
        RuntimeError: an image has no caption.
    """
    from snapcap.service.captioning.model_defaults import ModelDefaults
    from snapcap.service.captioning.options import CaptionOptions
    from snapcap.service.offline.arguments import Job
    from snapcap.service.offline.captioning_run import caption_images
    from snapcap.service.offline.discovery import find_images
    from snapcap.service.offline.model import Model
    from snapcap.service.offline.outputs import Outputs
    from snapcap.service.offline.progress import LoggedProgress

    loaded = opened.loaded
    checkpoint, plan = loaded.checkpoint, loaded.plan
    defaults = ModelDefaults(checkpoint.tokenizer, checkpoint.config)
    model = Model(checkpoint, opened.engine, plan.table.largest.size, plan.device, "", defaults)
    began = time.perf_counter()
    job = Job((str(folder),), CaptionOptions(), output=str(output), overwrite=True)
    with contextlib.closing(Outputs(job, find_images(job.images, False, ()))) as outputs:
        progress = LoggedProgress()
        progress.begin(len(outputs.todo), "")
        tally = caption_images(model, outputs.todo, job.options, outputs, progress, threads)
    seconds = time.perf_counter() - began
    if tally.error or tally.failures or tally.captions != len(outputs.todo):
        raise RuntimeError(f"{tally.captions} of {len(outputs.todo)} captions: {tally.error or tally.failures[:1]}")
    return tally.captions / seconds


def check(output: Path, expected: dict[str, str | None]) -> None:
    """Raises RuntimeError unless the file has one line for each image, in order, with its caption."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    if [line["file_name"] for line in lines] != list(expected):
        raise RuntimeError(f"{len(lines)} lines, or not in order, for {len(expected)} images")
    wrong = [line for line in lines if expected[line["file_name"]] not in (None, line["caption"])]
    if wrong:
        raise RuntimeError(f"{len(wrong)} wrong captions, the first: {wrong[0]}")


def measure(opened: Opened, workload: Workload, options: argparse.Namespace) -> tuple[list[dict[str, float]], int]:
    """The rates of each round, and how many images are in a folder."""
    from snapcap.service.images.threads import decode_threads
    from snapcap.service.offline.captioning_run import images_ahead

    images = captioned_right(opened, list(workload.images.values()))
    threads = decode_threads(options.decode_threads)
    ahead = images_ahead(opened.loaded.plan.table.largest.size, threads)
    submit = partial(ask, opened, images)

    def engine() -> tuple[float, float]:
        began = time.process_time()
        done = closed_loop(submit, ahead, options.seconds / 2)
        return done["captions_per_s"], (time.process_time() - began) / done["n"] * 1000

    engine()
    count = max(int(engine()[0] * options.seconds), len(workload.images))
    folder = options.cache / "folder" / str(os.getpid())
    folder.parent.mkdir(exist_ok=True)
    expected = make_folder(workload, folder, count)
    output = folder / "captions.jsonl"
    rounds = []
    for _ in range(options.rounds):
        before, engine_cpu = engine()
        began = time.process_time()
        rate = caption_folder(opened, folder, output, threads)
        folder_cpu = (time.process_time() - began) / count * 1000
        after, _ = engine()
        check(output, expected)
        rounds.append(
            {
                "engine": (before + after) / 2,
                "folder": rate,
                "ratio": 2 * rate / (before + after),
                "drift": after / before,
                "engine_cpu_ms": engine_cpu,
                "folder_cpu_ms": folder_cpu,
            }
        )
    return rounds, count


def report(rounds: list[dict[str, float]], count: int) -> Report:
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    rows = [
        [
            turn,
            number(each["engine"], 1),
            number(each["folder"], 1),
            f"{each['ratio']:.2f} ×",
            f"{each['drift']:.2f} ×",
            number(each["engine_cpu_ms"], 1),
            number(each["folder_cpu_ms"], 1),
        ]
        for turn, each in [*((str(turn), each) for turn, each in enumerate(rounds, start=1)), ("median", middle)]
    ]
    columns = [
        "round",
        "engine cap/s",
        "folder cap/s",
        "of engine",
        "drift",
        "engine CPU ms each",
        "folder CPU ms each",
    ]
    note = f"{count} JPEGs a folder; target ≥ {LEAST} ×; drift: the engine after the folder to before it"
    out = Report()
    out.add("A folder beside the engine", columns, rows, note)
    return out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--backend", choices=("aot", "eager"), default="eager")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--buckets", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="of one operation; 0: as the server")
    parser.add_argument("--decode-threads", type=int, default=0, help="0: one for each CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of the engine, and about as long the folder")
    add_files(parser)
    options = parser.parse_args()
    with scratch(options.cache) as options.cache:
        workload = open_workload(options.model, options.cache)
        options.model = workload.folder
        with contextlib.closing(open_engine(options)) as opened:
            rounds, count = measure(opened, workload, options)
    report(rounds, count).write(options.json, {"rounds": rounds})
    sys.exit(statistics.median(each["ratio"] for each in rounds) < LEAST)


if __name__ == "__main__":
    main()
