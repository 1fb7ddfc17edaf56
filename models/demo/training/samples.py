"""Paints the sample pictures and their captions.

python -m snapcap.models.demo.training.samples --out models/demo/samples
"""

import argparse
import json
from itertools import count
from pathlib import Path

from snapcap.models.demo.training.drawing import paint
from snapcap.models.demo.training.scenes import scene_of

FIRST = 100_000  # number far behind the held-out scenes of the accuracy measurement
SIZE = 192  # twice the model's image size, so that serving a sample resizes it
WANTED = {"one": 2, "group": 2, "inside": 2, "pair": 4, "row": 2}


def write_samples(folder: Path) -> None:
    """Paints the first held-out scenes of each kind, each with a background unlike the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    captions: dict[str, str] = {}
    for kind, wanted in WANTED.items():
        scenes, background = (scene_of("held_out", index) for index in count(FIRST)), ""
        for number in range(1, wanted + 1):
            scene = next(each for each in scenes if each.kind == kind and each.background != background)
            name, background = f"{kind}-{number}.png", scene.background
            paint(scene, SIZE).save(folder / name, optimize=True)
            captions[name] = scene.caption
    (folder / "captions.json").write_text(json.dumps(captions, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures and captions.json")
    write_samples(parser.parse_args().out)
