"""The names checkpoints give their tensors -> the names snapcap uses, one rename table per layout."""

import re
from collections.abc import Mapping

from torch import Tensor

# What transformers 4 and 5 write (`save_pretrained`).
_SAVED = (
    (r"encoder\.embeddings\.cls_token", "encoder.class_token"),
    (r"encoder\.embeddings\.position_embeddings", "encoder.position"),
    (r"encoder\.embeddings\.patch_embeddings\.projection\.(weight|bias)", r"encoder.patch.\1"),
    (r"encoder\.encoder\.layer\.(\d+)\.layernorm_before\.(\w+)", r"encoder.layer.\1.norm1.\2"),
    (r"encoder\.encoder\.layer\.(\d+)\.layernorm_after\.(\w+)", r"encoder.layer.\1.norm2.\2"),
    (
        r"encoder\.encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.(\w+)",
        r"encoder.layer.\1.\2.\3",
    ),
    (r"encoder\.encoder\.layer\.(\d+)\.attention\.output\.dense\.(\w+)", r"encoder.layer.\1.out.\2"),
    (r"encoder\.encoder\.layer\.(\d+)\.intermediate\.dense\.(\w+)", r"encoder.layer.\1.fc1.\2"),
    (r"encoder\.encoder\.layer\.(\d+)\.output\.dense\.(\w+)", r"encoder.layer.\1.fc2.\2"),
    (r"encoder\.layernorm\.(\w+)", r"encoder.norm.\1"),
    (r"enc_to_dec_proj\.(\w+)", r"projection.\1"),
    (r"decoder\.transformer\.(wte|wpe|ln_f|h)\.(.+)", r"decoder.\1.\2"),
    (r"decoder\.lm_head\.weight", "decoder.lm_head.weight"),
)

# transformers 5's own module names, which a plain `torch.save(model.state_dict())` keeps.
_MODULES_V5 = (
    (r"encoder\.(?:encoder\.)?layers\.(\d+)\.layernorm_before\.(\w+)", r"encoder.layer.\1.norm1.\2"),
    (r"encoder\.(?:encoder\.)?layers\.(\d+)\.layernorm_after\.(\w+)", r"encoder.layer.\1.norm2.\2"),
    (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.q_proj\.(\w+)", r"encoder.layer.\1.query.\2"),
    (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.k_proj\.(\w+)", r"encoder.layer.\1.key.\2"),
    (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.v_proj\.(\w+)", r"encoder.layer.\1.value.\2"),
    (r"encoder\.(?:encoder\.)?layers\.(\d+)\.attention\.o_proj\.(\w+)", r"encoder.layer.\1.out.\2"),
    (r"encoder\.(?:encoder\.)?layers\.(\d+)\.mlp\.(fc1|fc2)\.(\w+)", r"encoder.layer.\1.\2.\3"),
)

# Tensors a captioner does not use: the pooler, ViT's mask token, and GPT-2's causal masks of older versions.
_UNUSED = re.compile(
    r"encoder\.pooler\..+"
    r"|encoder\.embeddings\.mask_token"
    r"|decoder\.transformer\.h\.\d+\.(attn|crossattention)\.(bias|masked_bias)"
)


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename to snapcap's names and drop what is never used; an unknown name is kept, for the strict reader."""
    rules = [(re.compile(pattern), target) for pattern, target in _SAVED + _MODULES_V5]
    return {_rename(name, rules): tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)}


def _rename(name: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, target in rules:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(target)
    return name
