"""Writes what a chat checkpoint has beside its weights: a small byte-level tokenizer, and SmolVLM's chat template.

The template is that of `HuggingFaceTB/SmolVLM-256M-Instruct` as transformers has it: `DEFAULT_CHAT_TEMPLATE` of
`models/smolvlm/processing_smolvlm.py` is the same with videos.
"""

import json
from pathlib import Path

from support.checkpoints.tokenizer_cases import byte_level_bpe

TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# The template of `llava-hf/llava-1.5-7b-hf`, without the replies of earlier turns.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# A template like Llama 3's, for messages with one text. The template itself adds the image.
TEXT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_end|>' + message['role'] + '\\n\\n' }}"
    "{% if message['role'] == 'user' %}{{ '<fake_token_around_image><image><global-img>' }}{% endif %}"
    "{{ message['content'] | trim + '<end_of_utterance>' }}{% endfor %}{{ '<|im_end|>assistant\\n\\n' }}"
)
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    "<row_1_col_1>",
)
# Tokens of the template before the image's tokens. The last but one also follows the image's tokens.
PREFIX = (1, 308, 33, 3, 6)
LLAVA_PREFIX, LLAVA_START = (60, 58, 44, 57, 33, 228), 206
END, START, PADDING, IMAGE, END_OF_UTTERANCE = 0, 1, 2, 4, 5
_TEXTS = ("Can you describe this image?", "User: Assistant:", "What colour is the shape in the middle of it?")


def write_chat_files(folder: Path, template: str = TEMPLATE) -> int:
    """Returns the number of tokens; the specials come first, in their order."""
    backend = byte_level_bpe(list(_TEXTS), list(SPECIALS))
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GPT2TokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return int(backend.get_vocab_size())
