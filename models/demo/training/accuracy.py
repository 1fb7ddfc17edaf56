"""Measures the demo model's exact match on held-out scenes, through transformers.

    python -m snapcap.models.demo.training.accuracy [--count 2000] [--device cuda]

Greedy captions are compared word for word. Prints the matches by kind of scene and some mistakes. Exits 1 below an
exact match of 0.97.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from transformers import AutoTokenizer, VisionEncoderDecoderModel, ViTImageProcessor

from snapcap.models.dataclass import dataclass
from snapcap.models.demo.training.drawing import paint
from snapcap.models.demo.training.scenes import scene_of

DEMO = Path(__file__).resolve().parent.parent
LEAST = 0.97


@dataclass(frozen=True)
class Captioner:
    """A checkpoint folder opened with transformers."""

    model: Any
    tokenizer: Any
    processor: Any

    @classmethod
    def open(cls, folder: Path, device: str = "cpu") -> Captioner:
        model: Any = VisionEncoderDecoderModel.from_pretrained(folder)
        return cls(
            model.eval().to(device),
            AutoTokenizer.from_pretrained(folder),
            ViTImageProcessor.from_pretrained(folder),
        )

    @torch.inference_mode()
    def captions(self, images: Sequence[Image]) -> list[str]:
        """Returns the greedy caption of each RGB image, computed as one batch."""
        pixels = self.processor(list(images), return_tensors="pt").pixel_values
        ids = self.model.generate(pixels.to(self.model.device), do_sample=False)
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


class Answer(NamedTuple):
    """The caption of a scene, and the model's caption."""

    number: int
    kind: str
    expected: str
    said: str


def answers(captioner: Captioner, count: int, batch: int = 100, first: int = 0) -> Iterator[Answer]:
    """Captions `count` held-out scenes from number `first` on, `batch` at a time."""
    for start in range(first, first + count, batch):
        scenes = [scene_of("held_out", index) for index in range(start, min(start + batch, first + count))]
        said = captioner.captions([paint(scene) for scene in scenes])
        for offset, (scene, text) in enumerate(zip(scenes, said, strict=True)):
            yield Answer(start + offset, scene.kind, scene.caption, text)


def exact_match(results: Sequence[Answer]) -> float:
    """Returns the share of captions that are right word for word, from 0 to 1."""
    return sum(answer.said == answer.expected for answer in results) / len(results)


def report(results: Sequence[Answer]) -> str:
    """Returns a table of exact matches by kind of scene, and some mistakes."""
    wrong = [answer for answer in results if answer.said != answer.expected]
    seen, missed = Counter(a.kind for a in results), Counter(a.kind for a in wrong)
    lines = [f"{kind:8} {seen[kind] - missed[kind]:5} of {seen[kind]:5}" for kind in sorted(seen)]
    lines.append(f"exact match {exact_match(results):.4f} on {len(results)} held-out scenes")
    return "\n".join([*lines, *(f"  {a.number}: {a.expected}\n  said: {a.said}" for a in wrong[:20])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO, help="checkpoint folder")
    parser.add_argument("--count", type=int, default=2000, help="held-out scenes")
    parser.add_argument("--first", type=int, default=0, help="number of the first held-out scene")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    found = list(answers(Captioner.open(options.folder, options.device), options.count, first=options.first))
    print(report(found))
    sys.exit(exact_match(found) < LEAST)
