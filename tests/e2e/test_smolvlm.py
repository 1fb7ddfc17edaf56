"""SmolVLM through the real commands: transformers' own answers, compiled, without torch's module, by every API."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.build_folders import build_with_choices
from support.parity.served import write_pictures
from support.servers.server_process import ServerProcess, snapcap

pytestmark = pytest.mark.timeout(900)  # compiling
NEW_TOKENS = 12
JSON = {"Content-Type": "application/json"}
INSTRUCTIONS = ("Can you describe this image?", "What colour is it?")


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the files that SmolVLM's checkpoints have on the hub; its encoder's blocks and what
    chooses tokens are of the demo model's shapes, which g++ compiles once for both."""
    from support.checkpoints import random_captioners
    from support.checkpoints.chat_files import write_chat_files

    demo = json.loads((demo_folder / "config.json").read_text())
    encoder = demo["encoder"]
    same = ("hidden_size", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    vision = {name: encoder[name] for name in (*same, "layer_norm_eps", "hidden_act")}
    folder = tmp_path_factory.mktemp("smolvlm")
    model = random_captioners.smolvlm(vision, {"vocab_size": demo["decoder"]["vocab_size"]}, seed=7)
    model.generation_config.max_new_tokens = NEW_TOKENS
    model.save_pretrained(folder)
    write_chat_files(folder)
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 4 * encoder["image_size"]},
        "max_image_size": {"longest_edge": encoder["image_size"]},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., str]:
    """What transformers answers to an image and an instruction, without splitting."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Idefics3Processor, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    model = SmolVLMForConditionalGeneration.from_pretrained(folder).eval()
    vision = model.config.vision_config
    tokens = (vision.image_size // vision.patch_size // model.config.scale_factor) ** 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    pictures = SmolVLMImageProcessorPil.from_pretrained(folder)
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=tokens, chat_template=template)

    def answer(path: Path, instruction: str, **settings: Any) -> str:
        content = [{"type": "image"}, {"type": "text", "text": instruction}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        given = processor(text=text, images=[Image.open(path)], return_tensors="pt", do_image_splitting=False)
        with torch.no_grad():
            output = model.generate(**given, **settings)
        return str(processor.decode(output[0, given["input_ids"].shape[1] :], skip_special_tokens=True)).strip()

    return answer


def chat(model: Path, path: Path, *texts: str) -> bytes:
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, *({"type": "text", "text": text} for text in texts)]
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": parts}]
    return json.dumps({"model": str(model), "messages": messages}).encode()


def test_a_compiled_server_without_torch_answers_as_transformers_does(
    built_cache: Path, folder: Path, tmp_path: Path, images: list[Path], reference: Callable[..., str]
) -> None:
    model = ("--model", str(folder), "--buckets", "4", "--cache-length", "48")
    options = ("--cache-dir", str(tmp_path), *model)
    build_with_choices(built_cache, tmp_path, *model)
    expected = {(path, text): reference(path, text) for path in images for text in INSTRUCTIONS}
    assert len(set(expected.values())) > len(images), "the answers of a random model must vary"
    with ServerProcess(*options, "--backend", "aot", "--strict") as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"], startup["torch_modules"]) == ("aot", "hit", 0)
        for path in images:
            assert server.caption(path)["caption"] == expected[path, INSTRUCTIONS[0]], "the default instruction"
            reply = server.caption(path, f"?prompt={INSTRUCTIONS[1]}".replace(" ", "%20"))
            assert (reply["caption"], reply["backend"]) == (expected[path, INSTRUCTIONS[1]], "aot")
        status, body, headers = server.call("/v1/chat/completions", chat(folder, images[0], INSTRUCTIONS[1]), JSON)
        assert status == 200, body
        assert {name.lower(): value for name, value in headers.items()}["x-snapcap-ignored"] == "system"
        assert body["choices"][0]["message"]["content"] == expected[images[0], INSTRUCTIONS[1]]
        status, body, _ = server.call("/v1/chat/completions", chat(folder, images[0], "word " * 300), JSON)
        assert (status, body["error"]["code"]) == (422, "prompt_too_long")
        beams = server.caption(images[0], "?num_beams=3")["caption"]
        assert beams == reference(images[0], INSTRUCTIONS[0], num_beams=3)
        metrics = server.metrics()
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0
    explained = snapcap("explain", *options)
    assert "model  smolvlm: smolvlm 96×96, 2 layers of 192 → llama, 3 layers of 48" in explained.stdout
