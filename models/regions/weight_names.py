"""Names the weights of each region, in the order in which the region takes them. Imports no torch."""

from snapcap.models.dimensions import BertConfig, DecoderConfig, GitConfig, Gpt2Config, LlamaConfig

VIT_EMBED = ("rescale", "mean", "std", "patch.weight", "patch.bias", "class_token", "position")
VIT_EMBED_NORM = ("norm.weight", "norm.bias")  # only CLIP has it
VIT_BLOCK = (
    "norm1.weight",
    "norm1.bias",
    "qkv.weight",
    "qkv.bias",
    "out.weight",
    "out.bias",
    "norm2.weight",
    "norm2.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
)
SIGLIP_EMBED = ("rescale", "mean", "std", "patch.weight", "patch.bias", "position")
SIGLIP_PROJECTION = ("norm.weight", "norm.bias", "projection.weight")
VIT_RELATIVE = ("relative",)  # only BEiT has it: a bias of attention for each pair of positions

GPT2_EMBED = ("token", "position")
GPT2_BLOCK = (
    "norm1.weight",
    "norm1.bias",
    "qkv.weight",
    "qkv.bias",
    "out.weight",
    "out.bias",
    "norm_cross.weight",
    "norm_cross.bias",
    "cross_q.weight",
    "cross_q.bias",
    "cross_out.weight",
    "cross_out.bias",
    "norm2.weight",
    "norm2.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
)
GPT2_HEAD = ("norm.weight", "norm.bias", "head.weight")

BERT_EMBED = ("token", "position")
BERT_EMBED_NORM = ("norm.weight", "norm.bias")
BERT_BLOCK = (
    "qkv.weight",
    "qkv.bias",
    "out.weight",
    "out.bias",
    "norm1.weight",
    "norm1.bias",
    "cross_q.weight",
    "cross_q.bias",
    "cross_out.weight",
    "cross_out.bias",
    "norm_cross.weight",
    "norm_cross.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
    "norm2.weight",
    "norm2.bias",
)
BERT_TRANSFORM = ("dense.weight", "dense.bias", "norm.weight", "norm.bias")
BERT_HEAD = ("head.weight", "head.bias")

GIT_BLOCK = (
    "qkv.weight",
    "qkv.bias",
    "out.weight",
    "out.bias",
    "norm1.weight",
    "norm1.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
    "norm2.weight",
    "norm2.bias",
)
GIT_PROJECTION = (
    "norm.weight",
    "norm.bias",
    "projection.weight",
    "projection.bias",
    "projection_norm.weight",
    "projection_norm.bias",
)
GIT_PREFIX_END = ("qkv.weight", "qkv.bias")

# DaViT's weights. An embedding is the region before a stage's blocks; a block has two halves.
DAVIT_PIXELS = ("rescale", "mean", "std")
DAVIT_EMBED = ("conv.weight", "conv.bias", "norm.weight", "norm.bias")
_DAVIT_HALF = (
    "conv1.weight",
    "conv1.bias",
    "norm1.weight",
    "norm1.bias",
    "qkv.weight",
    "qkv.bias",
    "out.weight",
    "out.bias",
    "conv2.weight",
    "conv2.bias",
    "norm2.weight",
    "norm2.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
)
DAVIT_BLOCK = tuple(f"{half}.{name}" for half in ("spatial", "channel") for name in _DAVIT_HALF)
# Weights of the region before Florence-2's prefix blocks. The blocks have the weights of GIT's.
BART_EMBED = (
    "image_position",
    "projection.weight",
    "projection_norm.weight",
    "projection_norm.bias",
    "token",
    "position",
    "norm.weight",
    "norm.bias",
)
LLAVA_PROJECTION = ("projection1.weight", "projection1.bias", "projection2.weight", "projection2.bias")
LLAMA_EMBED = ("token",)
LLAMA_BLOCK = (
    "norm1.weight",
    "qkv.weight",
    "frequencies",
    "out.weight",
    "norm2.weight",
    "gate_up.weight",
    "down.weight",
)
LLAMA_HEAD = ("norm.weight", "head.weight")
LLAMA_PREFIX_END = ("norm1.weight", "qkv.weight", "frequencies")
CHAT_PREFIX = ("prefix",)  # only if a chat template puts text before the image

CROSS_NORM = ("norm.weight", "norm.bias")
CROSS_KV = ("cross_kv.weight", "cross_kv.bias")
CROSS_PROJECTION = ("projection.weight", "projection.bias")


def of_decoder(decoder: DecoderConfig) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the weight names of three regions: before the blocks, the block, and after the blocks."""
    match decoder:
        case Gpt2Config():
            return GPT2_EMBED, GPT2_BLOCK, GPT2_HEAD
        case BertConfig():
            norm = BERT_EMBED_NORM if decoder.embedding_norm else ()
            transform = BERT_TRANSFORM if decoder.head_activation else ()
            block = GIT_BLOCK if isinstance(decoder, GitConfig) else BERT_BLOCK
            return BERT_EMBED + norm, block, transform + BERT_HEAD
        case LlamaConfig():
            return LLAMA_EMBED, LLAMA_BLOCK, LLAMA_HEAD
    raise TypeError(type(decoder).__name__)
