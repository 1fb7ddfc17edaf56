"""Reads Florence-2 (Xiao et al., 2023): DaViT, BART's encoder over image and task tokens, and BART's decoder.

The class is `Florence2ForConditionalGeneration`. Checkpoints have one of two layouts: transformers' own
(`florence-community/*`), or the layout of the code that came with the first checkpoints (`microsoft/*`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from snapcap.models.dimensions import DavitConfig, DavitStage, Florence2Config, Parts
from snapcap.models.families.generation import read_generation
from snapcap.models.families.parts import locations
from snapcap.models.families.parts.bert import bart_dimensions, bart_names
from snapcap.models.fields import MOST, MOST_LAYERS, Fields
from snapcap.models.names import Names
from snapcap.models.processing.processor_config import ANSWERS
from snapcap.models.text import INPUT, Task

# Types of the parts: transformers', and those of the first checkpoints' code.
_TEXTS, _VISIONS = ("bart", "florence2_language"), ("florence_vision", "davit", "florence2_vision")
_IMAGE_SIZE = 768  # size that every checkpoint was trained with; configurations do not name it
_MOST_STAGES = 16
_TASK_TOKENS = 15  # the longest task has 14; together with the image's 577 tokens, 15 make a multiple of 16
# transformers' default of 20 would end a detailed caption within its first sentence.
_NEW_TOKENS = 128
_EPS = 1e-5  # the default of torch.nn.LayerNorm, because there is no field for it
_POSITION_OFFSET = 2  # rows of a position table before the first token's row, as in fairseq
# Phrases whose boxes are no answer: those in the code of the first checkpoints. Later processors name them.
_NO_PHRASES = (
    "it,I,me,mine,you,your,yours,he,him,his,she,her,hers,they,them,their,theirs,one,oneself,we,us,our,ours,its,"
    "myself,yourself,himself,herself,itself,ourselves,yourselves,themselves,this,that,these,those,who,whom,whose,"
    "which,what,all,another,any,anybody,anyone,anything,each,everybody,everyone,everything,few,many,nobody,none,"
    "several,some,somebody,someone,something,each other,one another,the image,image,images,the,a,an,a group,"
    "other objects,lots,a set"
)
_OCR_PATTERN = "(.+?)" + 8 * r"<loc_(\d+)>"

_TOWER = r"(?:model\.)?vision_tower"
_BLOCK = rf"{_TOWER}\.blocks\.(\d+)\.(\d+)\.(spatial|channel)_block"
_PROJECTOR = r"model\.multi_modal_projector"
_LANGUAGE = r"(?:model\.language_model|language_model\.model)"

# Patterns inside a block match transformers' names and the older ones.
_INSIDE = (
    (r"conv(1|2)(?:\.fn\.dw)?\.(\w+)", r"conv\4.\5"),
    (r"norm(1|2)\.(\w+)", r"norm\4.\5"),
    (r"(?:window|channel)_attn\.norm\.(\w+)", r"norm1.\4"),
    (r"ffn\.norm\.(\w+)", r"norm2.\4"),
    (r"(?:window|channel)_attn\.(?:fn\.)?qkv\.(\w+)", r"qkv.\4"),
    (r"(?:window|channel)_attn\.(?:fn\.)?proj\.(\w+)", r"out.\4"),
    (r"ffn\.(?:fn\.net\.)?(fc1|fc2)\.(\w+)", r"\4.\5"),
)
NAMES = Names(
    rules=(
        (rf"{_TOWER}\.convs\.(\d+)\.(?:conv|proj)\.(\w+)", r"encoder.stage.\1.conv.\2"),
        (rf"{_TOWER}\.convs\.(\d+)\.norm\.(\w+)", r"encoder.stage.\1.norm.\2"),
        *((rf"{_BLOCK}\.{theirs}", rf"encoder.stage.\1.layer.\2.\3.{ours}") for theirs, ours in _INSIDE),
        (rf"{_PROJECTOR}\.image_projection\.weight", "projection.weight"),
        (r"image_projection", "projection.transposed"),
        (rf"(?:{_PROJECTOR}\.)?image_proj_norm\.(\w+)", r"projection_norm.\1"),
        (
            rf"(?:{_PROJECTOR}\.image_position_embed|image_pos_embed)\.(row|column)_embeddings\.weight",
            r"projection.\1",
        ),
        # Older files hold the shared embedding under each of its names.
        (rf"{_LANGUAGE}\.shared\.weight", "decoder.token"),
        (rf"{_LANGUAGE}\.decoder\.embed_tokens\.weight", "decoder.own_token"),
        (rf"{_LANGUAGE}\.encoder\.embed_tokens\.weight", "text_encoder.token"),
        *bart_names(rf"{_LANGUAGE}\.encoder", "text_encoder"),
        *bart_names(rf"{_LANGUAGE}\.decoder", "decoder"),
        (r"(?:language_model\.)?lm_head\.weight", "decoder.head.weight"),
    ),
    unused=(
        # Constants: zeros, and a sinusoidal table.
        r"language_model\.final_logits_bias",
        rf"(?:{_PROJECTOR}\.)?visual_temporal_embed\.pos_idx_to_embed",
    ),
)


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Reads a checkpoint's dimensions, generation settings and tasks."""
    config.architecture("Florence2ForConditionalGeneration")
    text, vision = config.section("text_config"), config.section("vision_config")
    text.one_of("model_type", _TEXTS, _TEXTS[0])
    if vision.values.get("model_type"):  # the first checkpoints' files have an empty type, which no code reads
        vision.one_of("model_type", _VISIONS)
    encoder = _encoder(vision)
    decoder = _decoder(text, config)
    _meet(vision, encoder, text, decoder)
    # transformers' default special tokens, and a default length of our own.
    specials = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}
    settings = read_generation((generation, config.values, text.values), decoder, specials, _NEW_TOKENS)
    tasks, not_done = _tasks(config)
    return Parts(encoder, decoder, replace(settings, not_done=(*settings.not_done, *not_done)), NAMES, True, tasks)


def _tasks(config: Fields) -> tuple[tuple[Task, ...], tuple[str, ...]]:
    """Returns the tasks, with the sentences that Florence2Processor puts in place of a task's name, and the
    processor's settings that are not supported."""
    answers = config.section(ANSWERS) if ANSWERS in config.values else Fields({})
    ocr, phrases = (
        answers.section(kind) if kind in answers.values else Fields({}) for kind in ("ocr", "phrase_grounding")
    )
    banned = phrases.values.get("banned_grounding_tokens", [] if answers.values else _NO_PHRASES.split(","))
    if not isinstance(banned, list) or not all(isinstance(each, str) for each in banned):
        raise phrases.error("banned_grounding_tokens", banned, "a list of texts is expected")
    area, pattern = ocr.number("AREA_THRESHOLD", 0.0), ocr.values.get("PATTERN", _OCR_PATTERN)
    boxes = locations.boxes
    tasks = (
        Task("caption", "What does the image describe?"),
        Task("detailed_caption", "Describe in detail what is shown in the image."),
        Task("more_detailed_caption", "Describe with a paragraph what is shown in the image."),
        Task("ocr", "What is the text in the image?", True),
        Task(
            "ocr_with_region",
            "What is the text in the image, with regions?",
            True,
            partial(locations.quads, least_area=area),
        ),
        Task("od", "Locate the objects with category name in the image.", True, boxes),
        Task("dense_region_caption", "Locate the objects in the image, with their descriptions.", True, boxes),
        Task("region_proposal", "Locate the region proposals in the image.", True, partial(boxes, labelled=False)),
        Task(
            "caption_to_phrase_grounding",
            f"Locate the phrases in the caption: {INPUT}",
            True,
            partial(boxes, banned=frozenset(banned)),
        ),
        Task("referring_expression_segmentation", f"Locate {INPUT} in the image with mask", True, locations.masks),
        Task("region_to_segmentation", f"What is the polygon mask of region {INPUT}", True, locations.masks),
        Task("open_vocabulary_detection", f"Locate {INPUT} in the image.", True, locations.boxes_or_masks),
        Task("region_to_category", f"What is the region {INPUT}?", True),
        Task("region_to_description", f"What does the region {INPUT} describe?", True),
        Task("region_to_ocr", f"What text is in the region {INPUT}?", True),
        Task("free_text", INPUT, True),
    )
    # A checkpoint's pattern is not run, because its time has no bound.
    return tasks, () if pattern in (_OCR_PATTERN, None) else (f"{ocr.prefix}PATTERN = {str(pattern)[:80]}",)


def _meet(vision: Fields, encoder: DavitConfig, text: Fields, decoder: Florence2Config) -> None:
    """Checks that encoder and decoder fit each other."""
    width = vision.positive_int("projection_dim", 1024)
    if width != decoder.hidden_size:
        raise vision.error("projection_dim", width, f"must equal text_config.d_model {decoder.hidden_size}")
    tokens = encoder.sequence_length + decoder.text_tokens
    if decoder.n_positions < tokens:
        raise text.error(
            "max_position_embeddings", decoder.n_positions, f"an image and a task have {tokens} tokens"
        )


def _encoder(fields: Fields) -> DavitConfig:
    """Returns the encoder's dimensions. Older files name two fields otherwise, and have two in nested objects."""
    fields.require("in_channels", 3, "images have 3 channels", default=3)
    fields.require("qkv_bias", True, "only layers with a bias are supported", default=True)
    source = fields.values.get("image_feature_source")
    if source not in (None, ["spatial_avg_pool", "temporal_avg_pool"]):
        raise fields.error("image_feature_source", source, "spatial_avg_pool and temporal_avg_pool are expected")
    stages = _stages(fields)
    last = stages[-1]
    pixels = prod(stage.stride for stage in stages)
    return DavitConfig(
        family="florence2",
        image_size=fields.size_pair("image_size", _IMAGE_SIZE),
        patch_size=(pixels, pixels),
        hidden_size=last.hidden_size,
        num_layers=sum(stage.num_layers for stage in stages),
        num_heads=last.num_heads,
        intermediate_size=last.inner_size,
        activation=fields.activation("activation_function", "gelu"),
        layer_norm_eps=_EPS,
        final_norm=False,
        stages=stages,
        window=fields.positive_int("window_size", 12),
        position_rows=_position_rows(fields, last.grid),
    )


def _position_rows(fields: Fields, grid: tuple[int, int]) -> int:
    """Returns the number of rows in each of the two position tables, and checks that they are enough for the
    grid."""
    older = fields.values.get("image_pos_embed")
    inner = Fields(older, f"{fields.prefix}image_pos_embed.") if isinstance(older, dict) else None
    if inner is not None and "max_position_embeddings" not in fields.values:
        positions = inner.positive_int("max_pos_embeddings", 50)
    else:
        positions = fields.positive_int("max_position_embeddings", 50)
    if positions < max(grid):
        raise fields.error("max_position_embeddings", positions, f"an image has {grid[0]}×{grid[1]} tokens")
    return positions


def _stages(fields: Fields) -> tuple[DavitStage, ...]:
    widths_field = "embed_dim" if "embed_dim" in fields.values else "dim_embed"
    widths = fields.whole_numbers(widths_field, (128, 256, 512, 1024), least=1)
    count = len(widths)
    if not 0 < count <= _MOST_STAGES:
        raise fields.error(widths_field, [*widths], f"1 to {_MOST_STAGES} numbers are expected")

    def each(field: str, default: tuple[int, ...], least: int = 1, most: int = MOST) -> tuple[int, ...]:
        values = fields.whole_numbers(field, default, least, most)
        if len(values) != count:
            raise fields.error(field, [*values], f"{count} numbers are expected, one for each of {widths_field}")
        return values

    depths = each("depths", (1, 1, 9, 1), most=MOST_LAYERS // _MOST_STAGES)
    heads = each("num_heads", (4, 8, 16, 32))
    groups = each("num_groups", (4, 8, 16, 32))
    kernels, strides = each("patch_size", (7, 3, 3, 3)), each("patch_stride", (4, 2, 2, 2))
    paddings = each("patch_padding", (3, 1, 1, 1), least=0)
    norms = fields.values.get("patch_prenorm", [False, True, True, True])
    if not isinstance(norms, list) or len(norms) != count or not all(isinstance(norm, bool) for norm in norms):
        raise fields.error("patch_prenorm", norms, f"{count} times true or false is expected")
    ratio = fields.positive_number("mlp_ratio", 4.0)
    stages: list[DavitStage] = []
    grid, before = fields.size_pair("image_size", _IMAGE_SIZE), 3
    for index, width in enumerate(widths):
        for field, parts in (("num_heads", heads), ("num_groups", groups)):
            if width % parts[index]:
                raise fields.error(field, [*parts], f"{widths_field} {width} is not divisible by {parts[index]}")
        kernel, stride, padding = kernels[index], strides[index], paddings[index]
        height, breadth = ((side + 2 * padding - kernel) // stride + 1 for side in grid)
        if height < 1 or breadth < 1:
            raise fields.error("patch_stride", [*strides], f"an image of {grid} leaves stage {index + 1} no token")
        grid = height, breadth
        stages.append(
            DavitStage(
                input_size=before,
                hidden_size=width,
                num_layers=depths[index],
                num_heads=heads[index],
                groups=groups[index],
                inner_size=int(width * ratio),
                kernel=kernel,
                stride=stride,
                padding=padding,
                norm_first=norms[index],
                grid=grid,
            )
        )
        before = width
    return tuple(stages)


def _decoder(fields: Fields, config: Fields) -> Florence2Config:
    for field in ("normalize_before", "add_final_layer_norm"):
        fields.require(field, False, "only BART's layers, which a norm follows, are supported", default=False)
    read = bart_dimensions(fields, 1024)
    return Florence2Config(
        **read,
        family="florence2",
        tied_head=config.switch("tie_word_embeddings", True),
        position_offset=_POSITION_OFFSET,
        encoder_layers=fields.layers("encoder_layers", 12),
        encoder_heads=fields.heads("encoder_attention_heads", 16, read["hidden_size"], "d_model"),
        encoder_inner_size=fields.positive_int("encoder_ffn_dim", 4096),
        text_tokens=_TASK_TOKENS,
    )
