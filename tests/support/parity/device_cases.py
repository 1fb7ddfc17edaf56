"""Makes small random captioners on any device: transformers' answers, and our runner as a start makes it.

The tests in tests/gpu are made of these cases. No case is specific to CUDA, so that all can run without it.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.checkpoints import qwen3_vl_files, random_captioners
from support.checkpoints.chat_files import LLAVA_TEMPLATE, write_chat_files
from support.parity.parity import NORMALISATION, pixel_values, random_images
from support.parity.references import (
    Generated,
    chat_pixels,
    chat_prompt,
    florence2_ids,
    generated_by_blip,
    generated_by_chat,
    generated_by_florence2,
    generated_by_git,
    generated_by_pair,
    generated_by_qwen3_vl,
)

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import Florence2Config
from snapcap.models.layers.fused import compiled_function
from snapcap.models.layers.weights import RegionFunction
from snapcap.models.processing.packed import grid_of
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.table import Region
from snapcap.warmup.build.builder import Builder
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Bucket, Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.model import Backend
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SlotRequest
from snapcap.warmup.runtime.torch_model import DTYPES, LoadedModel, load_model, torch_device
from snapcap.warmup.start.warmer import Warmer

PROMPT = (17, 44, 60)
STEPS = 20
# Buckets of builds in 16 bits: our kernels change at 3, 17, 32, 65 and 129 rows. Families with few of these kernels
# have fewer buckets.
BUCKETS = dict.fromkeys(("vit-gpt2", "blip", "git"), (1, 2, 4, 24, 64)) | dict.fromkeys(
    ("smolvlm", "florence2", "llava", "qwen3-vl"), (1, 64)
)
FEW_BUCKETS = (1, 4)  # buckets of builds in fp32
CACHE_LENGTH = 48
# More tokens than a kernel reads at once (290), a width that is no power of 2, a vocabulary of several blocks.
_WIDTH, _HEADS, _VOCABULARY = 96, 3, 397
_VISION = {"hidden_size": _WIDTH, "num_attention_heads": _HEADS, "intermediate_size": 192, "image_size": 272}
# Rows and columns of tokens of Qwen3-VL's pictures, in turn. The second and the fourth are padded to more tokens
# than the others.
GRIDS = ((3, 5), (9, 10), (20, 1), (2, 40))


@dataclass(frozen=True)
class Captioner:
    """A checkpoint folder and transformers' model of it, in fp32 on the CPU; ``generate`` is its greedy search."""

    folder: Path
    config: ModelConfig
    model: Any
    generate: Callable[[Any, list[np.ndarray], int, tuple[int, ...]], Generated]

    def encoded(self, model: Any, images: list[np.ndarray]) -> torch.Tensor:
        """The encoder's output of a copy of ``model``, on the device it is on; of those with a prefix what the
        decoder's last layer takes of it. Where it reads a text, that of none, with its padding. Laid out as
        `real` lays out ours."""
        if self.config.vision.token_buckets:
            return torch.cat([self._packed_prefix(model, image) for image in images])
        if hasattr(model, "git"):
            return self._prefix(model, images)
        if self.config.chat is not None:
            return self._chat_prefix(model, images)
        if isinstance(self.config.decoder, Florence2Config):
            return self._padded(model, images, self.config.decoder.text_tokens)
        encoder = model.vision_model if hasattr(model, "vision_model") else model.encoder
        pixels = pixel_values(images).to(model.device, model.dtype)
        output: torch.Tensor = encoder(pixel_values=pixels).last_hidden_state
        return output

    def _prefix(self, model: Any, images: list[np.ndarray]) -> torch.Tensor:
        pixels = pixel_values(images).to(model.device, model.dtype)
        start = torch.full((len(images), 1), self.config.generation.start_id, device=model.device)
        states = model(start, pixel_values=pixels, output_hidden_states=True).hidden_states
        prefix: torch.Tensor = states[self.config.decoder.num_layers - 1][:, :-1]
        return prefix

    def _chat_prefix(self, model: Any, images: list[np.ndarray]) -> torch.Tensor:
        pixels = chat_pixels(model, images).to(model.device, model.dtype)
        padded = [*chat_prompt(model)[:-1], *[0] * self.config.decoder.text_tokens]
        ids = torch.tensor([padded] * len(images), device=model.device)
        states = model(input_ids=ids, pixel_values=pixels, output_hidden_states=True).hidden_states
        prefix: torch.Tensor = states[self.config.decoder.num_layers - 1]
        return prefix

    def _padded(self, model: Any, images: list[np.ndarray], padding: int) -> torch.Tensor:
        ids = florence2_ids(model, [[0] * padding] * len(images))
        mask = torch.ones_like(ids)
        mask[:, -padding:] = 0
        pixels = pixel_values(images).to(model.device, model.dtype)
        start = torch.full((len(images), 1), self.config.generation.start_id, device=model.device)
        output = model(input_ids=ids, attention_mask=mask, pixel_values=pixels, decoder_input_ids=start)
        encoded: torch.Tensor = output.encoder_last_hidden_state
        return encoded

    def _packed_prefix(self, model: Any, image: np.ndarray) -> torch.Tensor:
        given = qwen3_vl_files.packed_inputs(model, [image], [0] * self.config.decoder.text_tokens)
        states = model(**given, output_hidden_states=True).hidden_states
        return self.real(states[self.config.decoder.num_layers - 1], [image])

    def real(self, output: torch.Tensor, images: list[np.ndarray]) -> torch.Tensor:
        """Returns the encoder's output of these images, without rows of padding. Pictures of several shapes have
        room for the most tokens, and zeros behind their own."""
        config = self.config
        if not config.vision.token_buckets:
            return output[: len(images)]
        found = output.new_zeros(len(images), config.encoded_length, output.shape[-1])
        for row, image in enumerate(images):
            length, text = len(config.prefix) + math.prod(grid_of(image)), config.decoder.text_tokens
            found[row, :length], found[row, -text:] = output[row, :length], output[row, -text:]
        return found

    def images(self, count: int) -> list[np.ndarray]:
        if self.config.vision.token_buckets:
            pictures = [qwen3_vl_files.picture(*GRIDS[seed % len(GRIDS)], seed) for seed in range(count)]
            return qwen3_vl_files.packed(pictures, self.config.vision.image_tokens)
        return random_images(self.config, count)


def vit_gpt2(folder: Path) -> Captioner:
    import transformers

    model = random_captioners.pair(
        transformers.ViTConfig(**random_captioners.VISION | _VISION),
        transformers.GPT2Config(vocab_size=_VOCABULARY, n_positions=64, n_embd=_WIDTH, n_layer=2, n_head=_HEADS),
    )
    return _written(folder, model, generated_by_pair)


def blip(folder: Path) -> Captioner:
    text = {"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": 192}
    return _written(folder, random_captioners.blip(_VISION, text), generated_by_blip)


def git(folder: Path) -> Captioner:
    text = {"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": 192}
    return _written(folder, random_captioners.git(_VISION, text), generated_by_git)


def smolvlm(folder: Path, kv_heads: int = 2) -> Captioner:
    """Three heads of queries share one of keys and values; 261 tokens before a row's own."""
    text = {"hidden_size": _WIDTH, "num_attention_heads": 6, "num_key_value_heads": kv_heads}
    text |= {"intermediate_size": 192, "max_position_embeddings": 400, "num_hidden_layers": 2}
    write_chat_files(folder)
    vision = _VISION | {"image_size": 256}
    return _written(folder, random_captioners.smolvlm(vision, text, scale_factor=1), generated_by_chat)


def llava(folder: Path) -> Captioner:
    """JoyCaption's shape: SigLIP up to its last layer but one, whose tokens are all seen, and Llama."""
    text = {"hidden_size": _WIDTH, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 192}
    text |= {"max_position_embeddings": 400, "num_hidden_layers": 2}
    write_chat_files(folder, LLAVA_TEMPLATE)
    model = random_captioners.llava("Siglip", _VISION, text, vision_feature_select_strategy="full")
    with torch.no_grad():  # drawn by Xavier's formula these are five times as large as others', and rounding shows
        for layer in model.model.vision_tower.encoder.layers:
            for parameter in layer.parameters():
                parameter.mul_(0.2 if parameter.dim() == 2 else 1)
    return _written(folder, model, generated_by_chat)


def qwen3_vl(folder: Path, kv_heads: int = 2) -> Captioner:
    """At most 118 tokens of a picture, so that pictures are padded to 64 or to 118."""
    text = {"hidden_size": _WIDTH, "intermediate_size": 192, "num_key_value_heads": kv_heads}
    vision = {"hidden_size": _WIDTH, "num_heads": _HEADS, "intermediate_size": 192, "out_hidden_size": _WIDTH}
    model = qwen3_vl_files.qwen3_vl(vision, text)
    qwen3_vl_files.written(model, folder, most=70 * 1024)
    return Captioner(folder, ModelConfig.from_folder(folder), model, generated_by_qwen3_vl)


def florence2(folder: Path, forced: bool = False) -> Captioner:
    """``forced``: the first and the last token are, as on the hub; else a row's tokens are its best logits."""
    # 17×17 tokens of the last stage, in windows that reach beyond the edge.
    text = {"vocab_size": _VOCABULARY, "d_model": _WIDTH, "decoder_attention_heads": _HEADS}
    text |= {"encoder_attention_heads": _HEADS, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
    vision = {"image_size": _VISION["image_size"], "projection_dim": _WIDTH}
    model = random_captioners.florence2(vision, text | {"max_position_embeddings": 320})
    if not forced:
        model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    return _written(folder, model, generated_by_florence2)


def _written(folder: Path, model: Any, generate: Callable[..., Generated]) -> Captioner:
    model.save_pretrained(folder)
    side = (
        model.config.vision_config.image_size if hasattr(model.config, "vision_config") else _VISION["image_size"]
    )
    mean, std = NORMALISATION.mean, NORMALISATION.std
    processor = {"rescale_factor": NORMALISATION.rescale, "image_mean": mean, "image_std": std}
    processor |= {"size": {"height": side, "width": side}, "do_center_crop": False}
    if hasattr(model.config, "scale_factor"):
        processor |= {"size": {"longest_edge": side}, "max_image_size": {"longest_edge": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return Captioner(folder, ModelConfig.from_folder(folder), model, generate)


@dataclass(frozen=True)
class Direct:
    """A backend of the functions that are compiled on this device, run without a compiler: the kernels alone."""

    model: LoadedModel
    name = "kernels"

    def callable(self, region: Region, bucket: Bucket) -> RegionFunction:
        return compiled_function(region.function, self.model.device, self.model.dtype)


def plan_of(device: torch.device, dtype: str, buckets: tuple[int, ...]) -> Plan:
    return Plan(str(device), dtype, buckets, CACHE_LENGTH, torch.get_num_threads())


def build(captioner: Captioner, plan: Plan, folder: Path, workers: int) -> Builder:
    """The build of all packages; it begins when it is run."""
    transform = _transform(captioner)
    checkpoint = Checkpoint("random", captioner.folder, captioner.config, transform)  # no build reads text
    return Builder(checkpoint, plan, folder, workers)


def open_model(captioner: Captioner, plan: Plan) -> LoadedModel:
    device, dtype = torch.device(plan.device), DTYPES[plan.dtype]
    return load_model(captioner.folder, captioner.config, _transform(captioner), plan, device, dtype)


def open_runner(model: LoadedModel, plan: Plan, backend: Backend) -> Runner:
    """Every bucket warm on the backend, and on CUDA captured, as a strict start leaves them."""
    runner = Runner(model, torch_device(model.device))
    status = StartupStatus()
    status.expect(plan.buckets, plan.device, plan.dtype)
    warmer = Warmer(runner, plan.table, status, Timeline.since_exec(), strict=True)
    warmer.warm(plan.table.buckets, backend)
    states = {bucket.state for bucket in status.buckets()}
    assert states <= {"captured"} if runner.device.runs_ahead else states <= {"warm", "eager"}, states
    return runner


def steps_with_logits(
    runner: Runner, bucket: Bucket, rows: list[SlotRequest], steps: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens [rows, steps] and fp32 logits [rows, steps, vocabulary] on the CPU, from the first slot on."""
    runner.admit(0, rows)
    tokens, logits = [], []
    for _ in range(steps):
        step = runner.decode_step(bucket)
        logits.append(step[: len(rows)].float().cpu())
        tokens.append(runner.tokens(len(rows)))
    return [list(row) for row in zip(*tokens, strict=True)], torch.stack(logits, dim=1)


def _transform(captioner: Captioner) -> ImageTransform:
    vision = captioner.config.vision
    return ImageTransform.from_folder(captioner.folder, vision.image_size, family=vision.family)


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """torch raises where an operation would wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
