"""Makes the demo model and its tokenizer, trains both, and measures the model's exact match on held-out scenes.

    python -m snapcap.models.demo.training.train --out DIR
    python -m snapcap.models.demo.training.train --measure models/demo [--count 2000] [--first 0]

Other processes paint training scenes while the model trains on those that are there. For the measurement, greedy
captions of transformers are compared word for word: the program prints the matches by kind of scene and some
mistakes, and exits with 1 below an exact match of 0.97.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.pool import IMapIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from snapcap.models.dataclass import dataclass
from snapcap.models.demo.training.drawing import paint
from snapcap.models.demo.training.scenes import scene_of

BLOCKS, BLOCK = 5860, 256  # distinct training scenes: 1.5 million, painted in blocks
FIRST = 40_000  # scenes that must be painted before training begins
LABELS = 18  # the longest caption with its end token has 17
IGNORED = -100  # label that the loss ignores
STEPS, BATCH, RATE = 14_000, 1024, 1e-3
WARM_UP = 0.03  # share of training in which the learning rate rises
EVALUATED, MEASURED = 2000, 100  # held-out scenes, and how many of them are captioned at a time
LEAST = 0.97  # exact match below which a measurement fails
IMAGE_SIZE = 96
PATCH_SIZE = 12
HIDDEN_SIZE = 192
HEADS = 6
MAX_LENGTH = 32  # tokens with start and end: the longest caption has 18, the rest is for a prompt
POSITIONS = 48
SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>", "<|pad|>")

Painted = tuple[NDArray[np.uint8], list[str]]  # pixels [BLOCK, height, width, 3] and captions


def paint_block(number: int) -> Painted:
    """Paints training scenes `number` × BLOCK and those that follow."""
    scenes = [scene_of("train", index) for index in range(number * BLOCK, (number + 1) * BLOCK)]
    return np.stack([np.asarray(paint(scene)) for scene in scenes]), [scene.caption for scene in scenes]


def build_tokenizer(captions: int = 5000) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer like GPT-2's on captions of training scenes, until every word is one
    token."""
    start, end, pad = SPECIAL_TOKENS
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than there are merges
        special_tokens=[start, end, pad],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator((scene_of("train", index).caption for index in range(captions)), trainer)
    names = {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": end}
    return GPT2Tokenizer(tokenizer_object=learned, model_max_length=MAX_LENGTH, **names)


def build_model(tokenizer: PreTrainedTokenizerBase) -> VisionEncoderDecoderModel:
    """Returns an untrained model in fp32: under 3 million parameters, 0.23 GFLOP to encode an image."""
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        intermediate_size=640,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    text = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=POSITIONS,
        n_embd=HIDDEN_SIZE,
        n_layer=2,
        n_head=HEADS,
        n_inner=768,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        add_cross_attention=True,
        **ids | {"is_decoder": True},
    )
    model = VisionEncoderDecoderModel(
        encoder=ViTModel(vision, add_pooling_layer=False), decoder=GPT2LMHeadModel(text)
    )
    start = ids.pop("bos_token_id")
    model.config.update({**ids, "decoder_start_token_id": start, "tie_word_embeddings": True})
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        decoder_start_token_id=start, bos_token_id=start, max_length=MAX_LENGTH, **ids
    )
    return model


def save(model: VisionEncoderDecoderModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the checkpoint folder: configuration, weights, tokenizer and image processor."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # some versions make it readable for the owner alone
    tokenizer.save_pretrained(folder)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    ViTImageProcessor(size=size).save_pretrained(folder)


class SceneStore:
    """Holds on the device all scenes painted so far. `batch` draws from them with replacement."""

    def __init__(self, painted: IMapIterator[Painted], tokenizer: PreTrainedTokenizerBase, device: str) -> None:
        self._painted, self._tokenizer = painted, tokenizer
        size = IMAGE_SIZE
        self._pixels = torch.empty((BLOCKS * BLOCK, size, size, 3), dtype=torch.uint8, device=device)
        self._labels = torch.empty((BLOCKS * BLOCK, LABELS), dtype=torch.int64, device=device)
        self.filled = 0

    def fill(self, least: int = 0) -> None:
        """Takes in the scenes that are painted by now. Waits for the first `least` scenes."""
        while self.filled < len(self._pixels):
            try:
                pixels, captions = self._painted.next(None if self.filled < least else 0)
            except multiprocessing.TimeoutError:
                return
            rows = [[*ids, self._tokenizer.eos_token_id] for ids in self._tokenizer(captions)["input_ids"]]
            labels = [row + [IGNORED] * (LABELS - len(row)) for row in rows]
            block = slice(self.filled, self.filled + BLOCK)
            self._pixels[block] = torch.from_numpy(pixels).to(self._pixels.device)
            self._labels[block] = torch.tensor(labels).to(self._labels.device)
            self.filled += BLOCK

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normalised pixels, float32 [BATCH, 3, H, W], and labels, int64 [BATCH, LABELS]."""
        chosen = torch.randint(self.filled, (BATCH,), device=self._pixels.device)
        pixels = self._pixels[chosen].permute(0, 3, 1, 2).float()
        return pixels / 127.5 - 1, self._labels[chosen]


def train(model: Any, store: SceneStore, max_seconds: float) -> None:
    """Trains the model in place, for `STEPS` steps or `max_seconds` seconds, whichever is shorter."""
    model.train()
    weights = list(model.parameters())
    groups = [  # only matrices have weight decay
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.05},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), fused=True)
    began = time.monotonic()
    for step in range(STEPS):
        seconds = time.monotonic() - began
        done = max(step / STEPS, seconds / max_seconds)
        if done >= 1:
            break
        store.fill()
        for group in optimizer.param_groups:
            group["lr"] = RATE * _schedule(done)
        pixels, labels = store.batch()
        with torch.autocast(pixels.device.type, torch.bfloat16):
            loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            print(f"step {step:6} {seconds:5.0f} s  loss {loss.item():.5f}  {store.filled:,} scenes", flush=True)
    model.eval()


def _schedule(done: float) -> float:
    """Returns the factor of the learning rate: linear warm-up, then a cosine down to zero."""
    if done < WARM_UP:
        return done / WARM_UP
    return (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2


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


def answers(captioner: Captioner, count: int, first: int = 0) -> Iterator[Answer]:
    """Captions `count` held-out scenes from number `first` on."""
    for start in range(first, first + count, MEASURED):
        scenes = [scene_of("held_out", index) for index in range(start, min(start + MEASURED, first + count))]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="train, and write the checkpoint to this folder")
    task.add_argument("--measure", type=Path, help="measure the checkpoint in this folder")
    parser.add_argument("--max-seconds", type=float, default=900, help="training ends then at the latest")
    parser.add_argument("--count", type=int, default=EVALUATED, help="held-out scenes")
    parser.add_argument("--first", type=int, default=0, help="number of the first held-out scene")
    options = parser.parse_args()
    if options.out:
        make(options.out, options.max_seconds)
    captioner = Captioner.open(options.out or options.measure, device())
    found = list(answers(captioner, options.count, options.first))
    print(report(found))
    return int(exact_match(found) < LEAST)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def make(folder: Path, max_seconds: float) -> None:
    """Trains a model, and writes it."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model: Any = build_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    processes = max(1, (os.cpu_count() or 2) - 4)
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # forked before CUDA is initialised
        store = SceneStore(pool.imap_unordered(paint_block, range(BLOCKS)), tokenizer, device())
        store.fill(FIRST)
        train(model.to(device()), store, max_seconds)
    save(model.float().cpu(), tokenizer, folder)


if __name__ == "__main__":
    sys.exit(main())
