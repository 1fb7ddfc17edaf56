"""Lists the regions of a captioner: the functions that are compiled one at a time. Imports no torch.

A region takes activations and caches first, then its weights, and returns one tensor. A region holds no state, so
one compiled block serves all layers, and one artifact serves every checkpoint of the same shapes. The dimensions of
encoder and decoder say which regions there are, and which module of `models.layers` has their functions and
weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, cast

import numpy as np

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import (
    BEAMS,
    ON_DEMAND,
    PENALTIES,
    SAMPLING,
    DecoderConfig,
    VisionConfig,
    stage_regions,
)
from snapcap.models.memory.memory import B, Memory
from snapcap.models.regions.state import (
    FEATURES,
    GRIDS,
    PENALISE_INPUTS,
    RULE_INPUTS,
    SAMPLE_INPUTS,
    SELECT_INPUTS,
    TEXTS,
    BeamState,
    DecodeState,
    TokenRules,
)

if TYPE_CHECKING:
    from snapcap.models.layers.weights import NamedWeights, RegionFunction, WeightSource
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
    """A pure function with the names of its inputs: activations and caches. Its weights follow them.

    load: returns the function.
    layers: the number of weight sets, all of the same shapes. The region runs once with each set.
    hidden: the shape of the activation that the region before it returns, without the batch dimension.
    writes: for each layer of the region, the decoder layers whose K/V it writes during an encode. Empty if it
        writes none.
    after: for each layer of the region, the number of layers of the region before it that run first. Empty if all
        do.
    tokens: the number of tokens to which pictures of any shape are padded; 0 for pictures of one shape. The region
        has a name of its own for each such number, and the same weights.
    """

    name: str
    component: Component
    load: "Callable[[], RegionFunction]" = field(repr=False, compare=False)
    input_names: tuple[str, ...]
    layers: int = 1
    hidden: tuple[int, ...] = ()
    writes: tuple[slice, ...] = ()
    after: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def weights_name(self) -> str:
        """Returns the name of the region's weights."""
        return self.name.removesuffix(f"_t{self.tokens}")

    @cached_property
    def function(self) -> "RegionFunction":
        """Returns the function that is compiled, or runs as it is in eager serving."""
        return self.load()

    @property
    def on_demand(self) -> bool:
        """Returns whether the region runs only for requests that ask for it, so that no start waits for it."""
        return self.name in ON_DEMAND


@dataclass(frozen=True)
class Regions:
    """All regions of a captioner.

    encoder: the regions of an encode, in the order in which they run. A stage is a region before its blocks, a
        block that runs once for each layer, and a region after the blocks. There may be several stages, such as
        vision and prefix, and a stage may lack a part. For pictures of any shape, the list holds all regions for
        each number of tokens, and an encode runs those of one number.
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


@dataclass(frozen=True)
class Weights(Generic[B]):
    """For each name of a region's weights, one tuple of tensors per layer, in the order in which the region takes
    them."""

    sets: Mapping[str, tuple[tuple[B, ...], ...]]

    @classmethod
    def of_names(cls, regions: Mapping[str, tuple[tuple[str, ...], ...]], tensors: Mapping[str, B]) -> "Weights[B]":
        """Returns weights from tensors by name. ``regions`` holds the names for each region and layer."""
        return cls(
            {
                region: tuple(tuple(tensors[name] for name in layer) for layer in layers)
                for region, layers in regions.items()
            }
        )

    def of(self, region: Region) -> tuple[tuple[B, ...], ...]:
        return self.sets[region.weights_name]


class Layers(Protocol):
    """A module of `models.layers` that computes and loads an encoder, or a decoder with what stands before it."""

    def regions(self, config: ModelConfig) -> "Mapping[str, RegionFunction]":
        """Returns the function of each region by the region's name. Touches no tensor."""
        ...

    def weights(self, take: "WeightSource", config: ModelConfig) -> "Mapping[str, list[NamedWeights]]":
        """Returns the weights of each layer of each region."""
        ...


def layers_of(part: VisionConfig | DecoderConfig) -> Layers:
    """Returns the module that computes and loads an encoder or a decoder. The module imports torch."""
    return cast(Layers, import_module(f"snapcap.models.layers.{part.layers}"))


def region_functions(config: ModelConfig) -> "Mapping[str, RegionFunction]":
    """Returns the function of each region by the region's name. Imports torch, and touches no tensor."""
    from snapcap.models.layers import choice  # noqa: PLC0415 - imports torch

    return {
        **layers_of(config.vision).regions(config),
        **layers_of(config.decoder).regions(config),
        PENALTIES: choice.penalise,
        SAMPLING: choice.sample,
        BEAMS: choice.select,
    }


def build_regions(config: ModelConfig) -> Regions:
    """Returns the regions of a checkpoint, by its dimensions."""
    return Regions(_encoder(config), _decoder(config), _choice(config))


def _encoder(config: ModelConfig) -> tuple[Region, ...]:
    """Returns the regions of an encode, for each number of tokens if there are several."""
    if not config.vision.token_buckets:
        return _stages(config)
    return tuple(
        replace(region, name=f"{region.name}_t{tokens}", tokens=tokens)
        for tokens in config.vision.token_buckets
        for region in _stages(config.for_tokens(tokens))
    )


def _stages(config: ModelConfig) -> tuple[Region, ...]:
    """Returns two regions for each stage of the encoder, those of a prefix, and the end that writes K/V."""
    vision: list[Region] = []
    hidden: tuple[int, ...] = ()
    grids = ("slots", GRIDS[0]) if config.vision.token_buckets else ()
    for number, (layers, shape) in enumerate(config.vision.stage_shapes, 1):
        before, block = stage_regions(number)
        first = ("hidden",) if vision else ("pixels", *grids)
        vision.append(_region(config, "encoder", before, first, hidden=hidden))
        hidden = shape
        vision.append(_region(config, "encoder", block, ("hidden", *grids), layers=layers, hidden=hidden))
    if config.vision.taps:
        vision.append(_tap(config, "encoder_tap", config.vision.taps, hidden))
    match config.decoder.prefix:
        case "none":
            return (*vision, _encoder_after(config, hidden))
        case "encoder":
            return (*vision, *_encoded_prefix(config, hidden))
        case "decoder":
            return (*vision, *_decoded_prefix(config, hidden))


def _tap(config: ModelConfig, name: str, after: tuple[int, ...], hidden: tuple[int, ...]) -> Region:
    """Returns a region that writes or reads features beside ``hidden``, after some layers of the region before."""
    inputs = ("hidden", "slots", FEATURES)
    return _region(config, "encoder", name, inputs, layers=len(after), hidden=hidden, after=after)


def _region(config: ModelConfig, component: Component, name: str, inputs: tuple[str, ...], **more: Any) -> Region:
    return Region(name, component, partial(_function, config, name), inputs, **more)


def _function(config: ModelConfig, name: str) -> "RegionFunction":
    return region_functions(config)[name]


def _encoder_after(config: ModelConfig, hidden: tuple[int, ...]) -> Region:
    """Returns the end of an encoder whose decoder has cross-attention."""
    every = slice(0, config.decoder.num_layers)
    return _region(config, "encoder", "encoder_after", ("hidden", *IMAGE_KV), hidden=hidden, writes=(every,))


def _encoded_prefix(config: ModelConfig, image: tuple[int, ...]) -> tuple[Region, ...]:
    """Returns a stage over the tokens of the image and of a text, and the end that every encoder with
    cross-attention has."""
    decoder = config.decoder
    hidden, inputs = (config.prefix_length, decoder.hidden_size), ("hidden", "slots", TEXTS[0])
    return (
        _region(config, "encoder", "prefix_before", inputs, hidden=image),
        _region(config, "encoder", "prefix_block", inputs, layers=decoder.prefix_layers, hidden=hidden),
        _encoder_after(config, hidden),
    )


def _decoded_prefix(config: ModelConfig, image: tuple[int, ...]) -> tuple[Region, ...]:
    """Returns a stage of the decoder's own layers over the prefix. The last layer computes only its K/V."""
    decoder = config.decoder
    hidden = config.encoded_length, decoder.hidden_size
    text, own_kv = (("slots", TEXTS[0]), OWN_KV) if decoder.reads_prompt else ((), ())
    grids = GRIDS[:1] if config.vision.token_buckets else ()
    inputs = ("hidden", *IMAGE_KV, *own_kv, *grids)
    *layers, last = (slice(number, number + 1) for number in range(decoder.num_layers))
    of_stage = partial(_region, config, "encoder", hidden=hidden)
    before = _region(config, "encoder", "prefix_before", ("hidden", *text), hidden=image)
    block = of_stage("prefix_block", inputs, layers=decoder.prefix_layers, writes=tuple(layers))
    after = of_stage("prefix_after", inputs, writes=(last,))
    taps = tuple(range(1, len(config.vision.taps) + 1))  # the first layers' outputs
    tap = (_tap(config, "prefix_tap", taps, hidden),) if taps else ()
    return (before, block, *tap, after) if layers else (before, after)


def _decoder(config: ModelConfig) -> tuple[Region, ...]:
    decoder = config.decoder
    # Cross-attention reads the text's end, because it must ignore the padding behind it.
    text = TEXTS[1:] if decoder.text_tokens and not decoder.reads_prompt else ()
    grid = GRIDS[1:] if config.vision.token_buckets else ()
    region = partial(_region, config, "decoder", hidden=(decoder.hidden_size,))
    return (
        region("decoder_before", ("tokens", "positions")),
        region("decoder_block", ("hidden", "positions", *text, *grid, *LAYER_KV), layers=decoder.num_layers),
        region("decoder_after", ("hidden", *ROWS)),
    )


def _choice(config: ModelConfig) -> tuple[Region, Region, Region]:
    def region(name: str, *inputs: str) -> Region:
        return _region(config, "decoder", name, inputs)

    scores = ("logits", "normalised", *ROWS, "ends", "key_cache", "value_cache")
    return (
        region(PENALTIES, "logits", *ROWS, *RULE_INPUTS, *PENALISE_INPUTS),
        region(SAMPLING, "logits", *ROWS, *SAMPLE_INPUTS, "sequences"),
        region(BEAMS, *scores, *SELECT_INPUTS),
    )


def region_inputs(region: Region, config: ModelConfig, state: DecodeState[B], rows: int) -> tuple[B, ...]:
    """Returns the activations and caches of a region for a bucket of ``rows``, in the region's order.

    Inputs that the runner keeps in ``state`` are views of it. Activations that another region would compute are
    zeros. Compilation and checks of single regions use this. The weights follow them.
    """
    memory = state.memory
    if region.on_demand:
        vocabulary = config.decoder.vocab_size
        logits, rules = memory.zeros("float32", (rows, vocabulary)), TokenRules.allocate(vocabulary, memory)
        beams = BeamState.allocate(state.slots, state.cache_length, memory)
        scores = (logits, memory.view(rules.ends, slice(1))) if region.name == BEAMS else (logits,)
        return (*scores, *choice_inputs(region.name, state, beams, rules, rows))
    own = dict(zip(ROWS, state.rows(ROWS, rows), strict=True))
    own["slots"] = memory.zeros("int64", (rows,))
    memory.write(own["slots"], range(rows), np.arange(rows))
    match region.input_names[0]:
        case "pixels":
            first = pixels_of(region, memory.zeros("uint8", (rows, *config.vision.image_size, 3)), rows, memory)
        case "tokens":
            first = own["tokens"]
        case _:
            first = memory.zeros(state.dtype, (rows, *region.hidden))
    return (first, *layer_inputs(region, state, rows, own)[0])


def pixels_of(region: Region, pixels: B, rows: int, memory: Memory[B]) -> B:
    """Returns a view of the pixels [slots, height, width, 3] that a region of an encode takes: the first ``rows``
    pictures, and of packed pictures the region's number of tokens."""
    tokens = (slice(region.tokens),) if region.tokens else ()
    return memory.view(pixels, slice(rows), *tokens)


def layer_order(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Returns the order in which the layers of regions run, as (place of the region, layer)."""
    order: list[tuple[int, int]] = []
    for place, region in enumerate(regions):
        first = len(order) - (regions[place - 1].layers if region.after else 0)
        for layer in range(region.layers):
            at = first + region.after[layer] + layer if region.after else len(order)
            order.insert(at, (place, layer))
    return order


def layer_inputs(region: Region, state: DecodeState[B], rows: int, own: Mapping[str, B]) -> list[tuple[B, ...]]:
    """Returns the inputs of each layer of a region of an encode or a decode step, without the first input and the
    weights.

    The inputs are the buffers of ``own``, which have ``rows`` rows, and views of the caches, texts and grids.
    """
    caches: list[dict[str, B]] = [{}] * region.layers
    if region.writes:
        caches = [dict(zip(IMAGE_KV[1:], state.image_kv(layers), strict=True)) for layers in region.writes]
        if OWN_KV[0] in region.input_names:
            for cache, layers in zip(caches, region.writes, strict=True):
                cache.update(zip(OWN_KV, state.own_kv(layers), strict=True))
    elif FEATURES in region.input_names:
        caches = [{FEATURES: state.features_of(layer)} for layer in range(region.layers)]
    elif LAYER_KV[0] in region.input_names:
        caches = [dict(zip(LAYER_KV, layer, strict=True)) for layer in state.layers(rows)]
    own = {**own, **state.requested(rows)}
    return [tuple(({**own, **cache})[name] for name in region.input_names[1:]) for cache in caches]


def choice_inputs(
    name: str, state: DecodeState[B], beams: BeamState[B], rules: TokenRules[B], rows: int
) -> tuple[B, ...]:
    """Returns the inputs that a region of ``choice`` takes after the scores of ``rows`` rows: views of buffers."""
    own = state.rows(ROWS, rows)
    if name == PENALTIES:
        return (*own, *rules.inputs, *beams.inputs(PENALISE_INPUTS, rows))
    if name == SAMPLING:
        return (*own, *state.rows(SAMPLE_INPUTS, rows), beams.sequences)
    if name == BEAMS:
        return (*own, rules.ends, state.key, state.value, *beams.inputs(SELECT_INPUTS, rows))
    raise ValueError(name)
