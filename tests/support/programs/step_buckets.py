"""Starts the demo model with step buckets on a device, and captions a crowd before and after they are ready.

    python -m support.programs.step_buckets CACHE DEVICE BUCKETS STEP_BUCKETS FOLDER

FOLDER has the pictures. Prints one line of JSON: the state of each bucket of decode steps alone at READY and at the
end, the most rows of a step before and after, the captions of both crowds, and torch's modules.
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from support.servers.demo_engine import Demo, opened

from snapcap.service import readiness
from snapcap.warmup.machine.worker import begin
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions


def states(demo: Demo) -> list[str]:
    alone = demo.loaded.plan.step_buckets
    return [bucket.state for bucket in demo.status.buckets() if bucket.size in alone]


def crowd(demo: Demo, paths: list[Path]) -> tuple[int, list[str]]:
    """The most rows of a step, and the captions. Each row is a beam, so that enough rows run at once also where an
    encode takes as long as a caption."""
    demo.observer.steps.clear()
    found = demo.together(*(demo.request(path, num_beams=2) for path in paths))
    return max(rows for _, rows in demo.observer.steps), [demo.tokenizer.decode(each.tokens) for each in found]


def main() -> None:
    cache, device, buckets, step_buckets, folder = sys.argv[1:]
    sizes = [tuple(map(int, text.split(","))) for text in (buckets, step_buckets)]
    after_ready: list[Callable[[], object]] = []
    begun = readiness.after_ready

    def hold(work: Callable[[], object]) -> threading.Timer:
        after_ready.append(work)
        return begun(lambda: None)

    readiness.after_ready = hold
    compute = ComputeOptions(device, backend="aot", buckets=sizes[0], step_buckets=sizes[1], strict=True)
    with opened(StartOptions(ModelOptions(cache_dir=Path(cache)), compute)) as demo:
        at_ready = states(demo)
        pictures = itertools.cycle(sorted(Path(folder).glob("*.png")))
        paths = list(itertools.islice(pictures, demo.loaded.plan.slots))
        before = crowd(demo, paths)
        begin(after_ready[0], "after-ready")
        while "pending" in states(demo) or (demo.loaded.runner.device.runs_ahead and "warm" in states(demo)):
            time.sleep(0.02)
        after = crowd(demo, paths)
        found = {"at_ready": at_ready, "states": states(demo), "torch": "torch" in sys.modules}
    print(json.dumps(found | {"before": before, "after": after}))


if __name__ == "__main__":
    main()
