"""LLaVA through the real commands: transformers' own answers, compiled, without torch's module."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.build_folders import build_with_choices
from support.parity.served import write_pictures
from support.servers.server_process import ServerProcess

pytestmark = pytest.mark.timeout(900)  # compiling
INSTRUCTION = "Write a descriptive caption."


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of JoyCaption's kind; its encoder's blocks and what chooses tokens are of the demo model's
    shapes, which g++ compiles once for both."""
    from support.checkpoints import random_captioners
    from support.checkpoints.chat_files import TEXT_TEMPLATE, write_chat_files

    demo = json.loads((demo_folder / "config.json").read_text())
    encoder = demo["encoder"]
    same = ("hidden_size", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    vision = {name: encoder[name] for name in (*same, "layer_norm_eps", "hidden_act")}
    text = {"vocab_size": demo["decoder"]["vocab_size"], "rope_parameters": random_captioners.LLAMA3}
    model = random_captioners.llava("Siglip", vision, text, seed=7, vision_feature_select_strategy="full")
    model.generation_config.max_new_tokens = 12
    folder = tmp_path_factory.mktemp("llava")
    model.save_pretrained(folder)
    write_chat_files(folder, TEXT_TEMPLATE)
    processor = {"image_processor_type": "SiglipImageProcessor", "resample": 1}
    processor["size"] = dict.fromkeys(("height", "width"), encoder["image_size"])
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., str]:
    """What transformers answers to an image and an instruction."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = LlavaProcessor(
        SiglipImageProcessorPil.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        patch_size=model.config.vision_config.patch_size,
        vision_feature_select_strategy="full",
        chat_template=(folder / "chat_template.jinja").read_text(),
    )

    def answer(path: Path, instruction: str, **settings: Any) -> str:
        messages = [{"role": "user", "content": instruction}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        given = processor(text=text, images=[Image.open(path)], return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**given, **settings)
        return str(processor.decode(output[0, given["input_ids"].shape[1] :], skip_special_tokens=True)).strip()

    return answer


def test_a_compiled_server_without_torch_answers_as_transformers_does(
    built_cache: Path, folder: Path, tmp_path: Path, reference: Callable[..., str]
) -> None:
    model = ("--model", str(folder), "--buckets", "4", "--cache-length", "48")
    options = ("--cache-dir", str(tmp_path / "store"), *model)
    build_with_choices(built_cache, tmp_path / "store", *model)
    (tmp_path / "images").mkdir()
    images = write_pictures(tmp_path / "images")
    expected = {path: reference(path, INSTRUCTION) for path in images}
    assert len(set(expected.values())) > 1, "the model must see the image"
    asked = f"?prompt={INSTRUCTION}".replace(" ", "%20")
    with ServerProcess(*options, "--backend", "aot", "--strict") as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"], startup["torch_modules"]) == ("aot", "hit", 0)
        for path in images:
            reply = server.caption(path, asked)
            assert (reply["caption"], reply["backend"]) == (expected[path], "aot")
        beams = server.caption(images[0], f"{asked}&num_beams=3")["caption"]
        assert beams == reference(images[0], INSTRUCTION, num_beams=3)
        metrics = server.metrics()
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0
