"""Measures the demo model's exact match on held-out scenes, through transformers.

    python -m snapcap.models.demo.training.accuracy [--count 2000] [--device cuda]

Prints the matches by kind of scene, the words confused most often and some mistakes. Exits 1 below --at-least.
"""

import argparse
import sys
import time
from pathlib import Path

from snapcap.models.demo.training.evaluate import Captioner, answers, exact_match, report

DEMO = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO, help="checkpoint folder")
    parser.add_argument("--count", type=int, default=2000, help="held-out scenes")
    parser.add_argument("--first", type=int, default=0, help="number of the first held-out scene")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-least", type=float, default=0.97, help="the exact match that is asked for")
    options = parser.parse_args()

    began = time.perf_counter()
    captioner = Captioner.open(options.folder, options.device)
    results = list(answers(captioner, options.count, options.batch, options.first))
    print(report(results))
    print(f"{time.perf_counter() - began:.0f} s with painting, on {options.device}")
    sys.exit(exact_match(results) < options.at_least)


if __name__ == "__main__":
    main()
