"""GIT through the real commands: transformers' own captions, eager and compiled, and without torch's module."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints.build_folders import CHOICES_AND_BEAMS, build_with_choices
from support.parity.served import PROMPTS, Captions, assert_captions, write_pictures
from support.servers.server_process import ServerProcess, snapcap

BUCKETS = ("--buckets", "4")  # a request alone runs beside padding rows
pytestmark = pytest.mark.timeout(900)  # compiling


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the files that GIT's checkpoints have on the hub, of the demo model's shapes: what both
    have g++ compiles once."""
    from support.checkpoints import random_captioners
    from support.checkpoints.word_pieces import word_piece_vocabulary

    demo = json.loads((demo_folder / "config.json").read_text())
    encoder, decoder = demo["encoder"], demo["decoder"]
    same = ("hidden_size", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    same = (*same, "layer_norm_eps", "hidden_act")
    text = {
        "vocab_size": decoder["vocab_size"],
        "hidden_size": decoder["n_embd"],
        "num_hidden_layers": decoder["n_layer"],
        "num_attention_heads": decoder["n_head"],
        "max_position_embeddings": decoder["n_positions"],
    }
    folder = tmp_path_factory.mktemp("git")
    # Of this seed no two scores of any step are so near that rounding could decide between them.
    random_captioners.git({name: encoder[name] for name in same}, text, seed=7).save_pretrained(folder)
    words = word_piece_vocabulary().split()
    words += [f"word{number}" for number in range(len(words), decoder["vocab_size"])]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 96},
        "crop_size": {"height": 96, "width": 96},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., str]:
    """What transformers makes of an image, a prompt and settings: [CLS] and the text go to `generate`."""
    import torch
    from PIL import Image
    from transformers import BertTokenizer, GitForCausalLM, GitProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = GitProcessor(CLIPImageProcessorPil.from_pretrained(folder), BertTokenizer.from_pretrained(folder))
    model = GitForCausalLM.from_pretrained(folder).eval()

    def caption(path: Path, prompt: str = "", **settings: int) -> str:
        pixels = processor(images=Image.open(path), return_tensors="pt").pixel_values
        given = {}
        if prompt:
            ids = processor(text=prompt, add_special_tokens=False).input_ids
            given["input_ids"] = torch.tensor([[processor.tokenizer.cls_token_id, *ids]])
        output = model.generate(pixel_values=pixels, max_new_tokens=20, **given, **settings)
        return str(processor.decode(output[0], skip_special_tokens=True)).strip()

    return caption


@pytest.fixture(scope="module")
def expected(images: list[Path], reference: Callable[..., str]) -> Captions:
    captions = {(path, prompt): reference(path, prompt) for path in images for prompt in PROMPTS}
    assert len(set(captions.values())) > len(images), "the captions of a random model must vary"
    return captions


def test_a_server_on_eager_captions_as_transformers_does(folder: Path, tmp_path: Path, expected: Captions) -> None:
    options = ("--model", str(folder), "--cache-dir", str(tmp_path), "--backend", "eager")
    with ServerProcess(*options, "--buckets", "1,4") as server:
        server.wait_ready()
        assert_captions(server, expected, "eager")


def test_a_compiled_server_without_torch_captions_as_transformers_does(
    built_cache: Path,
    folder: Path,
    tmp_path: Path,
    images: list[Path],
    expected: Captions,
    reference: Callable[..., str],
) -> None:
    model = ("--model", str(folder), *BUCKETS)
    options = ("--cache-dir", str(tmp_path), *model)
    build_with_choices(built_cache, tmp_path, *model, taken=CHOICES_AND_BEAMS)
    with ServerProcess(*options, "--backend", "aot", "--strict") as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"], startup["torch_modules"]) == ("aot", "hit", 0)
        assert_captions(server, expected, "aot")
        for path in images:
            beams = server.caption(path, "?num_beams=3&no_repeat_ngram_size=2")["caption"]
            assert beams == reference(path, num_beams=3, no_repeat_ngram_size=2)
        metrics = server.metrics()
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0
    explained = snapcap("explain", *options)
    assert "model  git: git 96×96, 2 layers of 192 → git" in explained.stdout
