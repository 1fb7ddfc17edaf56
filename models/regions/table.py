"""Lists the regions of a captioner: the functions that are compiled one at a time. Imports no torch.

A region takes activations and caches first, then its weights, and returns one tensor. A region holds no state, so
one compiled block serves all layers, and one artifact serves every checkpoint of the same shapes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import (
    BeitConfig,
    ClipConfig,
    DavitConfig,
    Florence2Config,
    GitConfig,
    LlamaConfig,
    LlavaConfig,
    SiglipConfig,
)
from snapcap.models.memory.memory import B
from snapcap.models.regions import names
from snapcap.models.regions import weight_names as weights
from snapcap.models.regions.state.beams import PENALISE_INPUTS, SELECT_INPUTS, BeamState
from snapcap.models.regions.state.kv_cache import SAMPLE_INPUTS, TEXTS, DecodeState
from snapcap.models.regions.state.rules import RULE_INPUTS, TokenRules

if TYPE_CHECKING:
    from snapcap.models.regions.functions import RegionFunction

Component = Literal["encoder", "decoder"]
ROWS = ("tokens", "positions", "forced")
# Caches of one decoder layer, for the rows of a step.
LAYER_KV = ("key_cache", "value_cache", "cross_key", "cross_value")
IMAGE_KV = ("slots", "cross_keys", "cross_values")  # slots to write an image's K/V to; caches of some layers
OWN_KV = ("own_keys", "own_values")  # caches to write the K/V of a row's first tokens to, likewise
# Runs a region: takes its inputs and weights as buffers, and returns one more buffer.
RegionCall = Callable[..., Any]


@dataclass(frozen=True)
class Region:
    """A pure function with the names of its inputs (activations and caches) and of its weights, which follow them.

    load: returns the function.
    layers: the number of weight sets, all of the same shapes. The region runs once with each set.
    hidden: the shape of the activation that the region before it returns, without the batch dimension.
    writes: for each layer of the region, the decoder layers whose K/V it writes during an encode. Empty if it
        writes none.
    """

    name: str
    component: Component
    load: "Callable[[], RegionFunction]" = field(repr=False, compare=False)
    input_names: tuple[str, ...]
    weight_names: tuple[str, ...]
    layers: int = 1
    hidden: tuple[int, ...] = ()
    writes: tuple[slice, ...] = ()

    @cached_property
    def function(self) -> "RegionFunction":
        """Returns the function that is compiled, or runs as it is in eager serving."""
        return self.load()

    @property
    def on_demand(self) -> bool:
        """Returns whether the region runs only for requests that ask for it, so that no start waits for it."""
        return self.name in names.ON_DEMAND


@dataclass(frozen=True)
class Regions:
    """All regions of a captioner.

    encoder: the regions of an encode, in the order in which they run. A stage is a region before its blocks, a
        block that runs once for each layer, and a region after the blocks. There may be several stages, such as
        vision and prefix, and a stage may lack a part.
    decoder: the regions of a decode step, which is one stage.
    choice: the regions that run if a row is penalised, sampled or a beam.
    """

    encoder: tuple[Region, ...]
    decoder: tuple[Region, ...]
    choice: tuple[Region, Region, Region]

    def __iter__(self) -> Iterator[Region]:
        return iter((*self.encoder, *self.decoder, *self.choice))

    def __getitem__(self, name: str) -> Region:
        return {region.name: region for region in self}[name]

    def of(self, component: Component) -> tuple[Region, ...]:
        """Returns the regions that every encode, or every decode step, runs."""
        return self.encoder if component == "encoder" else self.decoder


def build_regions(config: ModelConfig) -> Regions:
    """Returns the regions of a checkpoint, by its dimensions."""
    return Regions(_encoder(config), _decoder(config), _choice(config))


def _encoder(config: ModelConfig) -> tuple[Region, ...]:
    vision = _davit(config, config.vision) if isinstance(config.vision, DavitConfig) else _vision(config)
    match config.decoder:
        case GitConfig():
            after = _prefix(config, weights.GIT_PROJECTION, weights.GIT_BLOCK, weights.GIT_PREFIX_END)
        case LlamaConfig() as decoder:
            before: tuple[str, ...] = (
                weights.LLAVA_PROJECTION if isinstance(decoder, LlavaConfig) else weights.SIGLIP_PROJECTION
            )
            before += weights.LLAMA_EMBED + (weights.CHAT_PREFIX if config.prefix else ())
            after = _prefix(config, before, weights.LLAMA_BLOCK, weights.LLAMA_PREFIX_END)
        case Florence2Config() as decoder:
            after = _bart_prefix(config, decoder)
        case _:
            after = _cross_kv(config)
    return (*vision, *after)


def _of_encoder(
    config: ModelConfig, name: str, inputs: tuple[str, ...], weight_names: tuple[str, ...], **more: Any
) -> Region:
    return Region(name, "encoder", partial(_function, config, name), inputs, weight_names, **more)


def _vision(config: ModelConfig) -> tuple[Region, Region]:
    vision = config.vision
    norm = weights.VIT_EMBED_NORM if isinstance(vision, ClipConfig) else ()
    embed = weights.SIGLIP_EMBED if isinstance(vision, SiglipConfig) else weights.VIT_EMBED
    relative = weights.VIT_RELATIVE if isinstance(vision, BeitConfig) and vision.relative else ()
    return (
        _of_encoder(config, "encoder_before", ("pixels",), embed + norm),
        _of_encoder(
            config,
            "encoder_block",
            ("hidden",),
            weights.VIT_BLOCK + relative,
            layers=vision.num_layers,
            hidden=vision.output_shape,
        ),
    )


def _davit(config: ModelConfig, vision: DavitConfig) -> tuple[Region, ...]:
    """Returns the two regions of each of DaViT's stages, which have different widths."""
    regions: list[Region] = []
    pixels = weights.DAVIT_PIXELS
    shape: tuple[int, ...] = ()
    for number, stage in enumerate(vision.stages, 1):
        before, block = names.stage(number)
        first = () if regions else pixels
        inputs = ("hidden",) if regions else ("pixels",)
        regions.append(_of_encoder(config, before, inputs, first + weights.DAVIT_EMBED, hidden=shape))
        shape = stage.output_shape
        layers = stage.num_layers
        regions.append(_of_encoder(config, block, ("hidden",), weights.DAVIT_BLOCK, layers=layers, hidden=shape))
    return tuple(regions)


def _cross_kv(config: ModelConfig) -> tuple[Region]:
    """Returns the end of an encoder whose decoder has cross-attention."""
    vision = config.vision
    names = (
        *(weights.CROSS_NORM if vision.final_norm else ()),
        *weights.CROSS_KV,
        *(weights.CROSS_PROJECTION if config.projected else ()),
    )
    return (_encoder_after(config, names, vision.output_shape),)


def _encoder_after(config: ModelConfig, names: tuple[str, ...], hidden: tuple[int, ...]) -> Region:
    every = slice(0, config.decoder.num_layers)
    return _of_encoder(config, "encoder_after", ("hidden", *IMAGE_KV), names, hidden=hidden, writes=(every,))


def _bart_prefix(config: ModelConfig, decoder: Florence2Config) -> tuple[Region, ...]:
    """Returns a stage over the tokens of the image and of a text, and the end that every encoder with
    cross-attention has."""
    hidden, inputs = (config.prefix_length, decoder.hidden_size), ("hidden", "slots", TEXTS[0])
    image = config.vision.sequence_length - 1, config.vision.hidden_size
    return (
        _of_encoder(config, "prefix_before", inputs, weights.BART_EMBED, hidden=image),
        _of_encoder(
            config, "prefix_block", inputs, weights.GIT_BLOCK, layers=decoder.encoder_layers, hidden=hidden
        ),
        _encoder_after(config, weights.CROSS_KV, hidden),
    )


def _prefix(
    config: ModelConfig, projection: tuple[str, ...], layer: tuple[str, ...], end: tuple[str, ...]
) -> tuple[Region, ...]:
    """Returns a stage of the decoder's own layers over the prefix. The last layer computes only its K/V.

    ``projection``, ``layer`` and ``end`` name the weights of the region before the layers, of a layer, and of the
    last layer's K/V.
    """
    vision, decoder = config.vision, config.decoder
    hidden = config.encoded_length, decoder.hidden_size
    text, own_kv = (("slots", TEXTS[0]), OWN_KV) if decoder.reads_prompt else ((), ())
    inputs = ("hidden", *IMAGE_KV, *own_kv)
    *layers, last = (slice(number, number + 1) for number in range(decoder.num_layers))
    of_stage = partial(_of_encoder, config, hidden=hidden)
    before = _of_encoder(config, "prefix_before", ("hidden", *text), projection, hidden=vision.output_shape)
    block = of_stage("prefix_block", inputs, layer, layers=len(layers), writes=tuple(layers))
    after = of_stage("prefix_after", inputs, end, writes=(last,))
    return (before, block, after) if layers else (before, after)


def _decoder(config: ModelConfig) -> tuple[Region, ...]:
    decoder = config.decoder
    before, block, after = weights.of_decoder(decoder)
    # Cross-attention reads the text's end, because it must ignore the padding behind it.
    text = TEXTS[1:] if decoder.text_tokens and not decoder.reads_prompt else ()

    def region(name: str, inputs: tuple[str, ...], weight_names: tuple[str, ...], layers: int = 1) -> Region:
        function = partial(_function, config, name)
        return Region(name, "decoder", function, inputs, weight_names, layers, (decoder.hidden_size,))

    return (
        region("decoder_before", ("tokens", "positions"), before),
        region("decoder_block", ("hidden", "positions", *text, *LAYER_KV), block, decoder.num_layers),
        region("decoder_after", ("hidden", *ROWS), after),
    )


def _choice(config: ModelConfig) -> tuple[Region, Region, Region]:
    def region(name: str, *inputs: str) -> Region:
        return Region(name, "decoder", partial(_function, config, name), inputs, ())

    scores = ("logits", "normalised", *ROWS, "ends", "key_cache", "value_cache")
    return (
        region(names.PENALTIES, "logits", *ROWS, *RULE_INPUTS, *PENALISE_INPUTS),
        region(names.SAMPLING, "logits", *ROWS, *SAMPLE_INPUTS, "sequences"),
        region(names.BEAMS, *scores, *SELECT_INPUTS),
    )


def _function(config: ModelConfig, name: str) -> "RegionFunction":
    from snapcap.models.regions.functions import region_functions  # noqa: PLC0415 - imports torch

    return region_functions(config)[name]


def region_inputs(region: Region, config: ModelConfig, state: DecodeState[B], rows: int) -> tuple[B, ...]:
    """Returns the activations and caches of a region for a bucket of ``rows``, in the region's order.

    Inputs that the runner keeps in ``state`` are views of it. Activations that another region would compute are
    zeros. Compilation and checks of single regions use this. The weights follow in the order of ``weight_names``.
    """
    memory = state.memory
    if region.on_demand:
        vocabulary = config.decoder.vocab_size
        logits, rules = memory.zeros("float32", (rows, vocabulary)), TokenRules.allocate(vocabulary, memory)
        beams = BeamState.allocate(state.slots, state.cache_length, memory)
        scores = (logits, memory.view(rules.ends, slice(1))) if region.name == names.BEAMS else (logits,)
        return (*scores, *choice_inputs(region.name, state, beams, rules, rows))
    own = dict(zip(ROWS, state.rows(ROWS, rows), strict=True))
    own["slots"] = memory.zeros("int64", (rows,))
    memory.write(own["slots"], range(rows), np.arange(rows))
    match region.input_names[0]:
        case "pixels":
            first = memory.zeros("uint8", (rows, *config.vision.image_size, 3))
        case "tokens":
            first = own["tokens"]
        case _:
            first = memory.zeros(state.dtype, (rows, *region.hidden))
    return (first, *layer_inputs(region, state, rows, own)[0])


def layer_inputs(region: Region, state: DecodeState[B], rows: int, own: Mapping[str, B]) -> list[tuple[B, ...]]:
    """Returns the inputs of each layer of a region of an encode or a decode step, without the first input and the
    weights.

    The inputs are the buffers of ``own``, which have ``rows`` rows, and views of the caches and texts.
    """
    caches: list[dict[str, B]] = [{}] * region.layers
    if region.writes:
        caches = [dict(zip(IMAGE_KV[1:], state.image_kv(layers), strict=True)) for layers in region.writes]
        if OWN_KV[0] in region.input_names:
            for cache, layers in zip(caches, region.writes, strict=True):
                cache.update(zip(OWN_KV, state.own_kv(layers), strict=True))
    elif LAYER_KV[0] in region.input_names:
        caches = [dict(zip(LAYER_KV, layer, strict=True)) for layer in state.layers(rows)]
    own = {**own, **state.texts_of(rows)}
    return [tuple(({**own, **cache})[name] for name in region.input_names[1:]) for cache in caches]


def choice_inputs(
    name: str, state: DecodeState[B], beams: BeamState[B], rules: TokenRules[B], rows: int
) -> tuple[B, ...]:
    """Returns the inputs that a region of ``choice`` takes after the scores of ``rows`` rows: views of buffers."""
    own = state.rows(ROWS, rows)
    match name:
        case names.PENALTIES:
            return (*own, *rules.inputs, *beams.inputs(PENALISE_INPUTS, rows))
        case names.SAMPLING:
            return (*own, *state.rows(SAMPLE_INPUTS, rows), beams.sequences)
        case names.BEAMS:
            return (*own, rules.ends, state.key, state.value, *beams.inputs(SELECT_INPUTS, rows))
    raise ValueError(name)
