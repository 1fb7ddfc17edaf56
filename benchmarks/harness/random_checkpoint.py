"""Writes a captioner with random weights in real shapes, as transformers' `save_pretrained` does.

    python -m snapcap.benchmarks.harness.random_checkpoint vit-b16-gpt2 FOLDER

Its configuration does not say which dtype it is stored in: so on a CPU snapcap runs it in float32, as the peers do.
Made without transformers and always the same for a seed. No token that ends a caption is ever chosen, so every
caption is exactly as long as its limit for whoever serves it; its captions mean nothing.
"""

import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.random_models import blip, florence2, git, llava, smolvlm, vit_gpt2
from snapcap.benchmarks.random_models.chat import ChatShapes
from snapcap.benchmarks.random_models.tensors import Shapes, TensorSpec

SEED = 0


@dataclass(frozen=True)
class RandomModel:
    """A family, which is a module of `benchmarks.random_models`, in some shapes."""

    family: ModuleType
    shapes: Shapes

    @property
    def tensors(self) -> list[TensorSpec]:
        return list(self.family.tensors(self.shapes))


RANDOM_MODELS = {
    # ViT-B/16 at 224 pixels and GPT-2 small with cross-attention.
    "vit-b16-gpt2": RandomModel(vit_gpt2, Shapes()),
    # Salesforce/blip-image-captioning-base: ViT-B/16 at 384 pixels and a decoder of BERT-base's size.
    "blip-base": RandomModel(blip, Shapes(image_size=384, vocab_size=30524, positions=512)),
    # microsoft/git-base-coco: CLIP's ViT-B/16 at 224 pixels and six layers of BERT-base's size.
    "git-base": RandomModel(git, Shapes(decoder_layers=6, vocab_size=30522)),
    # florence-community/Florence-2-base: DaViT at 768 pixels and a BART of six layers each.
    "florence2-base": RandomModel(
        florence2, florence2.Florence2Shapes(image_size=768, encoder_layers=6, decoder_layers=6, vocab_size=51289)
    ),
    # HuggingFaceTB/SmolVLM-256M-Instruct: SigLIP-B/16 at 512 pixels and thirty layers of SmolLM2's 135M.
    "smolvlm-256m": RandomModel(
        smolvlm, ChatShapes(image_size=512, decoder_layers=30, vocab_size=49280, positions=8192)
    ),
    # fancyfeast/llama-joycaption-beta-one-hf-llava: SigLIP-SO400M/14 at 384 pixels and Llama 3.1 8B.
    "llava-llama3-8b": RandomModel(
        llava,
        ChatShapes(
            image_size=384,
            patch_size=14,
            width=1152,
            heads=16,
            encoder_layers=27,
            inner=4304,
            decoder_layers=32,
            vocab_size=128256,
            positions=131072,
            text_width=4096,
            text_heads=32,
            kv_heads=8,
            text_inner=14336,
        ),
    ),
}


def write_checkpoint(model: RandomModel, folder: Path) -> None:
    """Write all files; the folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(
        tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)
    )  # and not a name that may be taken
    try:
        _write(model, staging)
        staging.replace(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write(model: RandomModel, staging: Path) -> None:
    staging.chmod(0o755)
    files = model.family.files(model.shapes)
    for name, content in files.small.items():
        (staging / name).write_text(json.dumps(content, indent=2) + "\n")
    (staging / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    _write_weights(model, staging / "model.safetensors")
    (staging / "model.safetensors").chmod(0o644)  # some versions write it for the owner alone


def _write_weights(model: RandomModel, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, model.shapes.dtype)

    def made(place: int, spec: TensorSpec) -> torch.Tensor:
        if spec.std:  # of a generator of its own, so that threads may draw
            generator = torch.Generator().manual_seed(SEED + place)
            tensor = torch.randn(spec.shape, generator=generator).mul_(spec.std)
        else:
            tensor = torch.full(spec.shape, spec.value)
        for index, value in spec.exceptions.items():
            tensor[index] = value
        return tensor.to(dtype)

    specs = model.tensors
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tensors = dict(zip((spec.name for spec in specs), pool.map(made, range(len(specs)), specs), strict=True))
    save_file(tensors, path, metadata={"format": "pt"})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=RANDOM_MODELS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_checkpoint(RANDOM_MODELS[options.model], options.folder)


if __name__ == "__main__":
    main()
