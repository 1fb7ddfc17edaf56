"""Florence-2 through the real commands: transformers' own captions of each task, and without torch's module."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.build_folders import CHOICES_AND_BEAMS, build_with_choices
from support.checkpoints.florence2_files import processor_of, write_florence2
from support.parity.served import write_pictures
from support.servers.server_process import ServerProcess, snapcap

BUCKETS = ("--buckets", "4")  # three beams run beside a padding row
TASKS = ("<CAPTION>", "<DETAILED_CAPTION>", "<MORE_DETAILED_CAPTION>")
NEW_TOKENS = 16
pytestmark = pytest.mark.timeout(900)  # compiling


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose decoder has the demo model's shapes: what both have g++ compiles once."""
    decoder = json.loads((demo_folder / "config.json").read_text())["decoder"]
    text = {
        "vocab_size": decoder["vocab_size"],
        "d_model": decoder["n_embd"],
        "decoder_layers": decoder["n_layer"],
        "decoder_attention_heads": decoder["n_head"],
        "encoder_attention_heads": decoder["n_head"],
        "decoder_ffn_dim": 4 * decoder["n_embd"],
        "encoder_layers": 1,
        "max_position_embeddings": 192,
    }
    folder = tmp_path_factory.mktemp("florence2")
    write_florence2(folder, text, seed=3)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., str]:
    """What transformers makes of an image and a task, with the checkpoint's generation settings and some others."""
    from PIL import Image
    from transformers import Florence2ForConditionalGeneration

    processor = processor_of(folder)
    model = Florence2ForConditionalGeneration.from_pretrained(folder).eval()

    def caption(path: Path, task: str = TASKS[0], prompt: str = "", **settings: Any) -> str:
        given = dict(processor(text=task, images=Image.open(path), return_tensors="pt"))
        if prompt:
            ids = processor.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
            start = model.generation_config.decoder_start_token_id, 0
            import torch

            given["decoder_input_ids"] = torch.cat((torch.tensor([start]), ids), dim=1)
        output = model.generate(**given, max_new_tokens=NEW_TOKENS, **settings)
        return str(processor.decode(output[0], skip_special_tokens=True)).strip()

    return caption


@pytest.fixture(scope="module")
def expected(images: list[Path], reference: Callable[..., str]) -> dict[str, list[str]]:
    """The captions of every image, by a query."""
    greedy: dict[str, Any] = {"num_beams": 1, "early_stopping": False}
    captions = {f"task={task}": [reference(path, task) for path in images] for task in TASKS}
    captions[""] = captions["task=<CAPTION>"]
    captions["task=detailed_caption&num_beams=1"] = [reference(path, TASKS[1], **greedy) for path in images]
    captions["num_beams=2&no_repeat_ngram_size=0"] = [
        reference(path, num_beams=2, no_repeat_ngram_size=0) for path in images
    ]
    captions["task=more_detailed_caption&prompt=What"] = [reference(path, TASKS[2], "What") for path in images]
    assert len({caption for each in captions.values() for caption in each}) > len(captions), "they must vary"
    return captions


def assert_captions(
    server: ServerProcess, images: list[Path], expected: dict[str, list[str]], backend: str
) -> None:
    for query, captions in expected.items():
        replies = [server.caption(path, f"?max_new_tokens={NEW_TOKENS}&{query}") for path in images]
        assert [reply["caption"] for reply in replies] == captions, query
        assert {reply["backend"] for reply in replies} == {backend}


def test_a_server_on_eager_captions_as_transformers_does(
    folder: Path, tmp_path: Path, images: list[Path], expected: dict[str, list[str]]
) -> None:
    options = ("--model", str(folder), "--cache-dir", str(tmp_path), "--backend", "eager")
    with ServerProcess(*options, "--buckets", "1,4", "--task", "detailed_caption") as server:
        startup = server.wait_ready().startup()
        assert startup["tasks"][:3] == ["detailed_caption", "caption", "more_detailed_caption"]
        changed = expected | {"": expected["task=<DETAILED_CAPTION>"]}
        del changed["num_beams=2&no_repeat_ngram_size=0"]
        assert_captions(server, images, changed, "eager")
        status, reply, _ = server.call("/v1/caption?task=odd", images[0].read_bytes())
        assert status == 422
        assert "caption, detailed_caption, more_detailed_caption" in reply["detail"]


def test_a_compiled_server_without_torch_captions_as_transformers_does(
    built_cache: Path, folder: Path, tmp_path: Path, images: list[Path], expected: dict[str, list[str]]
) -> None:
    model = ("--model", str(folder), *BUCKETS, "--cache-length", "48")
    options = ("--cache-dir", str(tmp_path), *model)
    build_with_choices(built_cache, tmp_path, *model, taken=CHOICES_AND_BEAMS)
    with ServerProcess(*options, "--backend", "aot", "--strict") as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"], startup["torch_modules"]) == ("aot", "hit", 0)
        assert startup["tasks"][:3] == ["caption", "detailed_caption", "more_detailed_caption"]
        assert_captions(server, images, expected, "aot")
        metrics = server.metrics()
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0
    explained = snapcap("explain", *options)
    assert "model  florence2: florence2 96×96, 3 layers of 32 → florence2" in explained.stdout


def test_a_task_that_the_model_has_not_stops_the_start(folder: Path, tmp_path: Path, images: list[Path]) -> None:
    options = ("--model", str(folder), "--cache-dir", str(tmp_path), "--task", "odd")
    run = snapcap("caption", str(images[0]), *options)
    assert run.returncode != 0
    assert "task odd: this model has caption, detailed_caption, more_detailed_caption" in run.stderr
