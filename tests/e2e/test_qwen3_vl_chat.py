"""Conversations with Qwen3-VL through a server: transformers' own answers, with the checkpoint's template."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.qwen3_vl_files import END, IMAGE, TEMPLATE, model_inputs, picture, qwen3_vl, written
from support.servers.server_process import ServerProcess

pytestmark = pytest.mark.timeout(300)
NEW_TOKENS = 12
Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief."}
SHOWN: dict[str, Any] = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
TEXT_FIRST: dict[str, Any] = {"role": "user", "content": SHOWN["content"][::-1]}
REPLY = {"role": "assistant", "content": "A dog in a field."}
ASKED = {"role": "user", "content": "What colour is it?"}
CONVERSATIONS: dict[str, Messages] = {
    "alone": [SHOWN],
    "system": [SYSTEM, SHOWN],
    "question behind": [SHOWN, REPLY, ASKED],
    "all": [SYSTEM, SHOWN, REPLY, ASKED],
    "turns before": [ASKED, {"role": "assistant", "content": "Show me."}, SHOWN],
    "text first": [TEXT_FIRST],
    "text first, all": [SYSTEM, TEXT_FIRST, REPLY, ASKED],
    "text on both sides": [{"role": "user", "content": [*TEXT_FIRST["content"], *SHOWN["content"][1:]]}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made = qwen3_vl(seed=7)
    made.generation_config.max_new_tokens = NEW_TOKENS
    with torch.no_grad():
        made.lm_head.weight[END] = 0  # so that no answer is empty
    return made, written(made, tmp_path_factory.mktemp("qwen3-vl"))


def sent(messages: Messages, url: str) -> Messages:
    """Returns messages with the image as OpenAI's API takes it."""
    image = {"type": "image_url", "image_url": {"url": url}}

    def parts(content: Any) -> Any:
        return content if isinstance(content, str) else [image if "text" not in each else each for each in content]

    return [{**each, "content": parts(each["content"])} for each in messages]


@torch.no_grad()
def test_answers_are_transformers_with_system_text_and_several_turns(model: tuple[Any, Path]) -> None:
    from transformers import AutoTokenizer

    reference, folder = model
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    image, data = picture(4, 3), io.BytesIO()
    image.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    described = [{"type": "text", "text": "Describe what is there to see. " * 5}, {"type": "image"}]
    behind = "text read behind"
    answers = {}
    for name, messages in {**CONVERSATIONS, behind: [{"role": "user", "content": described[::-1]}]}.items():
        text = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
        )
        before, after = (tokenizer(part)["input_ids"] for part in text.split("<|image_pad|>"))
        given = model_inputs(image, before, after)
        assert int((given["input_ids"] == IMAGE).sum()) == 12
        output = reference.generate(**given, do_sample=False)[0, given["input_ids"].shape[1] :]
        answers[name] = str(tokenizer.decode(output, skip_special_tokens=True)).strip()
    assert len(set(answers.values())) == len(answers), "each conversation must count"
    options = ("--model", str(folder), "--backend", "eager", "--build", "off", "--buckets", "2")
    options += ("--cache-length", "300", "--text-tokens", "120")  # the small tokenizer has a token for most letters
    with ServerProcess(*options) as server:
        server.wait_ready()
        for name, messages in CONVERSATIONS.items():
            body = json.dumps({"model": str(folder), "messages": sent(messages, url)}).encode()
            status, reply, _ = server.call("/v1/chat/completions", body, {"Content-Type": "application/json"})
            assert status == 200, reply
            assert reply["choices"][0]["message"]["content"] == answers[name], name
            assert "warnings" not in reply, name
        body = json.dumps({"messages": sent([{"role": "user", "content": described}], url)}).encode()
        _, reply, _ = server.call("/v1/chat/completions", body, {"Content-Type": "application/json"})
        assert reply["choices"][0]["message"]["content"] == answers[behind]
        (warning,) = reply["warnings"]
        assert "was read behind the image: a server with --text-tokens 1" in warning
        long = [{**SYSTEM, "content": "Be very brief, and name nothing but what is there to see. " * 3}, SHOWN]
        body = json.dumps({"messages": sent(long, url)}).encode()
        status, reply, _ = server.call("/v1/chat/completions", body, {"Content-Type": "application/json"})
        assert (status, reply["error"]["code"]) == (422, "prompt_too_long")
