"""Qwen3-VL through the real commands: transformers' own answers for pictures of several shapes, compiled, without
torch's module."""

import base64
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.checkpoints.build_folders import build_with_choices
from support.parity.pictures import encoded, scene
from support.servers.server_process import ServerProcess

pytestmark = pytest.mark.timeout(900)  # compiling
NEW_TOKENS = 12
JSON = {"Content-Type": "application/json"}
INSTRUCTIONS = ("Can you describe this image?", "What colour is it?")
# The last one has 70 tokens, and runs in the second number of tokens that is compiled.
SHAPES = ((200, 133), (50, 120), (320, 224))


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the files that Qwen3-VL's checkpoints have on the hub; what chooses tokens is of the demo
    model's shapes, which g++ compiles once for both."""
    import torch
    from support.checkpoints.qwen3_vl_files import END, PROCESSOR, qwen3_vl, write_files

    demo = json.loads((demo_folder / "config.json").read_text())
    folder = tmp_path_factory.mktemp("qwen3-vl")
    model = qwen3_vl(text={"vocab_size": demo["decoder"]["vocab_size"]}, seed=7)
    model.generation_config.max_new_tokens = NEW_TOKENS
    with torch.no_grad():
        model.lm_head.weight[END] = 0  # so that no answer is empty
    model.save_pretrained(folder)
    write_files(folder)
    size = {"shortest_edge": 4 * 1024, "longest_edge": 70 * 1024}
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "size": size}))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{width}.png" for width, _ in SHAPES]
    for seed, (path, shape) in enumerate(zip(paths, SHAPES, strict=True)):
        path.write_bytes(encoded(scene(*shape, seed)))
    return paths


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., str]:
    """Returns a function that asks transformers for the answer to an image and an instruction."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    template, image = (folder / "chat_template.jinja").read_text(), "<|image_pad|>"

    def answer(path: Path, instruction: str, text_first: bool = False, **settings: Any) -> str:
        content = [{"type": "image"}, {"type": "text", "text": instruction}]
        content = content[::-1] if text_first else content
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
        given = processor(Image.open(path), return_tensors="pt")
        count = int(given["image_grid_thw"].prod()) // 4
        ids = tokenizer(text.replace(image, image * count), return_tensors="pt")["input_ids"]
        kinds = (ids == tokenizer.convert_tokens_to_ids(image)).int()
        with torch.no_grad():
            output = model.generate(**given, input_ids=ids, mm_token_type_ids=kinds, **settings)
        return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()

    return answer


def chat(model: Path, *parts: dict[str, Any]) -> bytes:
    return json.dumps({"model": str(model), "messages": [{"role": "user", "content": parts}]}).encode()


def test_a_compiled_server_without_torch_answers_as_transformers_does(
    built_cache: Path, folder: Path, tmp_path: Path, images: list[Path], reference: Callable[..., str]
) -> None:
    model = ("--model", str(folder), "--buckets", "4", "--cache-length", "48")
    options = ("--cache-dir", str(tmp_path), *model)
    build_with_choices(built_cache, tmp_path, *model)
    expected = {(path, text): reference(path, text) for path in images for text in INSTRUCTIONS}
    assert reference(images[1], INSTRUCTIONS[1], text_first=True) != expected[images[1], INSTRUCTIONS[1]]
    assert len(set(expected.values())) > len(images), "the answers of a random model must vary"
    with ServerProcess(*options, "--backend", "aot", "--strict") as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"], startup["torch_modules"]) == ("aot", "hit", 0)
        replies: dict[tuple[Path, str], str] = {}

        def caption(path: Path, text: str) -> None:
            replies[path, text] = server.caption(path, f"?prompt={quote(text)}")["caption"]

        for path, text in expected:  # alone
            caption(path, text)
        assert replies == expected
        assert server.caption(images[0])["caption"] == expected[images[0], INSTRUCTIONS[0]], (
            "the default instruction"
        )
        replies.clear()
        threads = [threading.Thread(target=caption, args=key) for key in expected]  # shapes side by side
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert replies == expected
        beams = server.caption(images[2], "?num_beams=3")["caption"]
        assert beams == reference(images[2], INSTRUCTIONS[0], num_beams=3)
        url = f"data:image/png;base64,{base64.b64encode(images[1].read_bytes()).decode()}"
        image = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": INSTRUCTIONS[1]}
        status, body, _ = server.call("/v1/chat/completions", chat(folder, image, text), JSON)
        assert (status, body["choices"][0]["message"]["content"]) == (200, expected[images[1], INSTRUCTIONS[1]])
        status, body, _ = server.call("/v1/chat/completions", chat(folder, text, image), JSON)
        assert body["choices"][0]["message"]["content"] == reference(images[1], INSTRUCTIONS[1], text_first=True)
        assert "warnings" not in body
        status, body, _ = server.call("/v1/chat/completions", chat(folder, image, image, text), JSON)
        assert (status, body["choices"][0]["message"]["content"]) == (200, expected[images[1], INSTRUCTIONS[1]])
        assert "images" in body["warnings"][0], "the last of a message's images is captioned"
        video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        status, body, _ = server.call("/v1/chat/completions", chat(folder, video, text), JSON)
        assert (status, "messages[0].content[0]" in body["error"]["message"]) == (422, True)
        thin = tmp_path / "thin.png"
        thin.write_bytes(encoded(scene(201, 1)))
        status, body, _ = server.call("/v1/caption", thin.read_bytes(), {"Content-Type": "image/png"})
        assert (status, "too thin" in json.dumps(body)) == (422, True)
        metrics = server.metrics()
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0
