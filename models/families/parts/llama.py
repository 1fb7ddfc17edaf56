"""Reads the Llama part (Touvron et al., 2023) of models that take images, and its tensors' names."""

from typing import Any

from snapcap.models.fields import Fields
from snapcap.models.names import Rule
from snapcap.models.text import RopeConfig


def layer_names(model: str) -> tuple[Rule, ...]:
    """Returns the renaming rules of embeddings, layers and last norm of Llama's module tree under the pattern
    ``model``."""
    layer = rf"{model}\.layers\.(\d+)"
    return (
        (rf"{model}\.embed_tokens\.weight", "decoder.token"),
        (rf"{layer}\.self_attn\.(q|k|v)_proj\.weight", r"decoder.layer.\1.\2"),
        (rf"{layer}\.self_attn\.o_proj\.weight", r"decoder.layer.\1.out"),
        (rf"{layer}\.input_layernorm\.weight", r"decoder.layer.\1.norm1"),
        (rf"{layer}\.post_attention_layernorm\.weight", r"decoder.layer.\1.norm2"),
        (rf"{layer}\.mlp\.(gate|up|down)_proj\.weight", r"decoder.layer.\1.\2"),
        (rf"{model}\.norm\.weight", "decoder.norm"),
    )


def dimensions(fields: Fields, *, tied_head: bool) -> dict[str, Any]:
    """Returns the fields of a ``LlamaConfig``."""
    fields.require("model_type", "llama", "only Llama's text part is supported", default="llama")
    for field in ("attention_bias", "mlp_bias"):
        fields.require(field, False, "only layers without a bias are supported", default=False)
    hidden = fields.positive_int("hidden_size", 4096)
    heads = fields.positive_int("num_attention_heads", 32)
    kv_heads = fields.positive_int("num_key_value_heads") if _given(fields, "num_key_value_heads") else heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"num_attention_heads {heads} is not divisible by it")
    if _given(fields, "head_dim"):
        width = fields.positive_int("head_dim")
    else:
        width = hidden // fields.heads("num_attention_heads", 32, hidden)
    if width % 2:
        raise fields.error("head_dim", width, "rotary positions need an even number")
    return {
        "family": "llama",
        "vocab_size": fields.positive_int("vocab_size", 32000),
        "n_positions": fields.positive_int("max_position_embeddings", 2048),
        "hidden_size": hidden,
        "num_layers": fields.layers("num_hidden_layers", 32),
        "num_heads": heads,
        "inner_size": fields.positive_int("intermediate_size", 11008),
        "activation": fields.activation("hidden_act", "silu"),
        "layer_norm_eps": fields.positive_number("rms_norm_eps", 1e-6),
        "tied_head": tied_head,
        "num_kv_heads": kv_heads,
        "head_width": width,
        "rope": _rope(fields),
    }


def _given(fields: Fields, field: str) -> bool:
    return fields.values.get(field) is not None


def _rope(fields: Fields) -> RopeConfig:
    """Reads ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of transformers 4."""
    if _given(fields, "rope_parameters"):
        parameters = fields.section("rope_parameters")
        theta = parameters.positive_number("rope_theta", fields.positive_number("rope_theta", 10000.0))
    else:
        parameters = fields.section("rope_scaling") if _given(fields, "rope_scaling") else Fields({}, fields.prefix)
        theta = fields.positive_number("rope_theta", 10000.0)
    kind: Any = parameters.values.get("rope_type", parameters.values.get("type", "default"))
    match kind:
        case "default" | None:
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, scaling=(parameters.positive_number("factor"),))
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return RopeConfig(theta=theta, scaling=tuple(parameters.positive_number(name) for name in names))
    raise parameters.error("rope_type", kind, "supported are default, linear, llama3")
