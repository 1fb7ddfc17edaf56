"""BLIP through the real commands: transformers' own captions, eager and compiled; one store for two families."""

import json
import shutil
from pathlib import Path

import pytest
from support.checkpoints.build_folders import CHOICES_AND_BEAMS, build_with_choices
from support.parity.served import PROMPTS, Captions, assert_captions, write_pictures
from support.servers.server_process import ServerProcess, snapcap

BUCKETS = ("--buckets", "4")  # a request alone runs beside padding rows
pytestmark = pytest.mark.timeout(900)  # compiling


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the files that BLIP's checkpoints have on the hub.

    Of the demo model's shapes: at its largest bucket, half of the packages have a source that g++ has compiled
    for `built_cache` by then."""
    from support.checkpoints import random_captioners
    from support.checkpoints.word_pieces import word_piece_vocabulary

    demo = json.loads((demo_folder / "config.json").read_text())
    encoder, decoder = demo["encoder"], demo["decoder"]
    start = decoder["vocab_size"] - 1  # has no word, as [DEC], which a caption is not to have
    same = ("hidden_size", "num_attention_heads", "intermediate_size", "image_size", "patch_size", "layer_norm_eps")
    text = {
        "vocab_size": decoder["vocab_size"],
        "hidden_size": decoder["n_embd"],
        "num_hidden_layers": decoder["n_layer"],
        "num_attention_heads": decoder["n_head"],
        "max_position_embeddings": decoder["n_positions"],
        "encoder_hidden_size": encoder["hidden_size"],
        "bos_token_id": start,
    }
    folder = tmp_path_factory.mktemp("blip")
    # Of this seed no two scores of any step are so near that rounding could decide between them.
    model = random_captioners.blip({name: encoder[name] for name in same}, text, seed=9)
    model.save_pretrained(folder)
    words = word_piece_vocabulary().split()
    words += [f"word{number}" for number in range(len(words), start)]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    processor = {"image_processor_type": "BlipImageProcessor", "size": {"height": 96, "width": 96}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def expected(folder: Path, images: list[Path]) -> Captions:
    """What BlipProcessor and BlipForConditionalGeneration make of each image and prompt, decoded as their example
    does."""
    from PIL import Image
    from transformers import BertTokenizer, BlipForConditionalGeneration, BlipProcessor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    processor = BlipProcessor(BlipImageProcessorPil.from_pretrained(folder), BertTokenizer.from_pretrained(folder))
    model = BlipForConditionalGeneration.from_pretrained(folder).eval()
    captions = {}
    for path in images:
        for prompt in PROMPTS:
            text = {"text": prompt} if prompt else {}
            inputs = processor(images=Image.open(path), return_tensors="pt", **text)
            output = model.generate(**inputs, max_new_tokens=20)
            captions[path, prompt] = processor.decode(output[0], skip_special_tokens=True).strip()
    assert len(set(captions.values())) > len(images), "the captions of a random model must vary"
    return captions


def test_a_server_on_eager_captions_as_transformers_does(folder: Path, tmp_path: Path, expected: Captions) -> None:
    options = ("--model", str(folder), "--cache-dir", str(tmp_path), "--backend", "eager")
    with ServerProcess(*options, "--buckets", "1,4") as server:
        server.wait_ready()
        assert_captions(server, expected, "eager")


@pytest.fixture(scope="module")
def store(built_cache: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder whose store holds the demo model's artifacts and BLIP's."""
    cache = tmp_path_factory.mktemp("families")
    shutil.copytree(built_cache, cache, dirs_exist_ok=True)
    build_with_choices(built_cache, cache, "--model", str(folder), *BUCKETS, taken=CHOICES_AND_BEAMS)
    return cache


def test_a_compiled_server_captions_as_transformers_does(folder: Path, store: Path, expected: Captions) -> None:
    options = ("--model", str(folder), "--cache-dir", str(store), "--backend", "aot", "--strict")
    with ServerProcess(*options, *BUCKETS) as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"], startup["torch_modules"]) == ("aot", "hit", 0)
        assert_captions(server, expected, "aot")
        metrics = server.metrics()
    assert metrics['snapcap_compile_events_total{when="startup"}'] == 0
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0


def test_one_store_holds_both_families_and_explain_says_which(folder: Path, store: Path) -> None:
    blip = snapcap("explain", "--model", str(folder), "--cache-dir", str(store), *BUCKETS)
    assert blip.returncode == 0, blip.stdout
    assert "model  blip: blip 96×96, 2 layers of 192 → blip" in blip.stdout
    demo = snapcap("explain", "--cache-dir", str(store), "--buckets", "1,4")
    assert demo.returncode == 0, demo.stdout
    assert "model  vision-encoder-decoder: vit 96×96" in demo.stdout
    other = snapcap("explain", "--model", str(folder), "--cache-dir", str(store), "--buckets", "2")
    assert other.returncode == 1
    assert "near   blip: blip 96×96" in other.stdout
    assert "model.buckets is [2] here and [4] there" in other.stdout
