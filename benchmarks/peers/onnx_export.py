"""Exports a checkpoint to ONNX and optimises it for this machine, ahead of any start.

    python -m snapcap.benchmarks.peers.onnx_export models/demo FOLDER int8

There are two models. The encoder ends with the keys and values of the cross-attentions. A decode step takes past
keys and values. ONNX Runtime's optimised graphs are saved with their weights beside them, which a start maps. In
int8, `quantize_dynamic` has rounded the weights of products, with a scale for each output.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import onnxruntime
import torch
import transformers
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from snapcap.benchmarks.harness.random_checkpoint import complete_folder
from snapcap.benchmarks.peers.onnx_server import DECODER, DESCRIPTION, ENCODER, TOKENIZER, Description

# The first opset in which attention is one operation. Compared with opset 18, an encode is 1.1 times as fast, and
# a decode step of eight rows 1.2 times.
OPSET = 23


class Encoder(nn.Module):
    """Maps pixels to keys and values of every cross-attention, so the decoder computes nothing of an image
    again."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        hidden = self._model.encoder(pixels).last_hidden_state
        if hasattr(self._model, "enc_to_dec_proj"):
            hidden = self._model.enc_to_dec_proj(hidden)
        caches: list[Tensor] = []
        for block in self._model.decoder.transformer.h:
            attention = block.crossattention
            parts = attention.c_attn(hidden).split(attention.split_size, dim=2)
            caches += [part.unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for part in parts]
        return tuple(caches)


class Decoder(nn.Module):
    """Maps one token of each row, and the keys and values so far, to the next tokens and the new keys and values.

    GPT-2's blocks are called instead of the whole model, which would make masks that one token does not need. The
    greedy choice is made inside, so logits never leave the runtime.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._decoder = model.decoder

    def forward(self, tokens: Tensor, past: tuple[Tensor, ...], cross: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        transformer = self._decoder.transformer
        cache = EncoderDecoderCache(_cache(past), _cache(cross))
        cache.is_updated = dict.fromkeys(range(len(transformer.h)), True)
        position = torch.full((1, 1), past[0].shape[2])
        hidden = transformer.wte(tokens) + transformer.wpe(position)
        for block in transformer.h:
            # Only the shape of the image's states matters: their keys and values are in the cache.
            hidden = block(hidden, past_key_values=cache, encoder_hidden_states=hidden)
        logits = self._decoder.lm_head(transformer.ln_f(hidden))
        layers = cast(Any, cache.self_attention_cache).layers
        present = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return (logits[:, -1].argmax(-1, keepdim=True), *present)


def _cache(tensors: tuple[Tensor, ...]) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(len(tensors) // 2):
        cache.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
    return cache


def export(checkpoint: Path, output: Path, work: Path, *, int8: bool) -> None:
    """Writes all files of an export to ``output``. ``work`` has the graphs before they are optimised."""
    model: Any = transformers.VisionEncoderDecoderModel
    model = model.from_pretrained(checkpoint, dtype=torch.float32).eval()
    about = describe(model, checkpoint)
    (output / DESCRIPTION).write_text(json.dumps(asdict(about), indent=2) + "\n")
    shutil.copyfile(checkpoint / TOKENIZER, output / TOKENIZER)

    # torch takes sizes of 0 and 1 for constants, so the example has two rows and three tokens.
    rows, tokens = 2, 3
    pixels = torch.zeros(rows, 3, about.height, about.width)
    with torch.inference_mode():
        cross = Encoder(model)(pixels)
    past = tuple(torch.zeros(rows, about.heads, tokens, about.head_size) for _ in about.cache_names)
    dynamic = torch.export.Dim.DYNAMIC
    _export(
        Encoder(model),
        (pixels,),
        work / ENCODER,
        input_names=["pixels"],
        output_names=[f"cross_{name}" for name in about.cache_names],
        dynamic_shapes=({0: dynamic},),
    )
    _export(
        Decoder(model),
        (torch.zeros(rows, 1, dtype=torch.int64), past, cross),
        work / DECODER,
        input_names=["tokens", *_named("past", about), *_named("cross", about)],
        output_names=["next", *_named("present", about)],
        dynamic_shapes=({0: dynamic}, ({0: dynamic, 2: dynamic},) * len(past), ({0: dynamic},) * len(cross)),
    )
    for name in (ENCODER, DECODER):
        if int8:
            # Attention is left out, because the quantiser takes this operation for an older one of the same name.
            quant_pre_process(work / name, work / name, skip_symbolic_shape=True)
            quantize_dynamic(work / name, work / name, op_types_to_quantize=["MatMul"], per_channel=True)
        _optimise(work / name, output / name)


def describe(model: Any, checkpoint: Path) -> Description:
    """Returns the facts that the server needs, as transformers reads them."""
    processor_class: Any = transformers.AutoImageProcessor
    processor = processor_class.from_pretrained(checkpoint)
    generation, decoder = model.generation_config, model.config.decoder
    ends = generation.eos_token_id
    # Without a number of new tokens, the limit is the length, which counts the start token.
    limit = generation.max_new_tokens or generation.max_length - 1
    return Description(
        height=processor.size["height"],
        width=processor.size["width"],
        resample=int(processor.resample),
        scale=[processor.rescale_factor / std for std in processor.image_std],
        shift=[-mean / std for mean, std in zip(processor.image_mean, processor.image_std, strict=True)],
        layers=decoder.n_layer,
        heads=decoder.n_head,
        head_size=decoder.n_embd // decoder.n_head,
        start=generation.decoder_start_token_id,
        ends=[] if ends is None else [ends] if isinstance(ends, int) else list(ends),
        limit=limit,
    )


def _named(what: str, about: Description) -> list[str]:
    return [f"{what}_{name}" for name in about.cache_names]


def _export(module: torch.nn.Module, inputs: tuple[Any, ...], path: Path, **options: Any) -> None:
    with torch.inference_mode():
        program = torch.onnx.export(module, inputs, dynamo=True, opset_version=OPSET, verbose=False, **options)
    if program is None:
        raise RuntimeError(f"torch exported nothing for {path.name}")
    program.save(path)


def _optimise(source: Path, output: Path) -> None:
    """Saves a model after all of ONNX Runtime's optimisations for this CPU, so that a start has none to do."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(output)
    # Hides the warning that the graph is for this kind of machine alone, which is intended.
    options.log_severity_level = 3
    weights = f"{output.name}.weights"
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights)
    # Matrices are saved in the order in which products read them: 240 M parameters open in two thirds of the time.
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def main(checkpoint: str, output: str, precision: str) -> None:
    with complete_folder(Path(output)) as folder, tempfile.TemporaryDirectory() as work:
        export(Path(checkpoint), folder, Path(work), int8=precision == "int8")


if __name__ == "__main__":
    main(*sys.argv[1:])
