"""The regions of a captioner: what is compiled, one at a time, with weights as inputs. No torch.

A region takes activations and caches first, then its weights, and returns one tensor. It holds no state,
so one compiled block serves all layers, and one artifact every checkpoint of the same shapes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import BeitConfig, BertConfig, DecoderConfig, Gpt2Config
from snapcap.models.memory.memory import B
from snapcap.models.regions import names
from snapcap.models.regions import weight_names as weights
from snapcap.models.regions.state.beams import PENALISE_INPUTS, SELECT_INPUTS, BeamState
from snapcap.models.regions.state.kv_cache import SAMPLE_INPUTS, DecodeState

if TYPE_CHECKING:
    from snapcap.models.regions.functions import RegionFunction

Component = Literal["encoder", "decoder"]
# What runs a region: with its buffers and weights as inputs, it returns one more of them.
RegionCall = Callable[..., Any]


@dataclass(frozen=True)
class Region:
    """A pure function, the names of its activations and caches, and those of its weights, which follow them.

    ``load`` gives the function. ``layers`` is the number of weight sets, all of the same shapes.
    """

    name: str
    component: Component
    load: "Callable[[], RegionFunction]" = field(repr=False, compare=False)
    input_names: tuple[str, ...]
    weight_names: tuple[str, ...]
    layers: int = 1

    @cached_property
    def function(self) -> "RegionFunction":
        """What is compiled, and run as it is where nothing is."""
        return self.load()

    @property
    def on_demand(self) -> bool:
        """Whether it runs only when a request asks for what it does, so that no start waits for it."""
        return self.name in names.ON_DEMAND


@dataclass(frozen=True)
class Regions:
    """All regions in the order in which they run: encode is the first three, a decode step the next three, and the
    others where a row is penalised, sampled or a beam."""

    encoder_before: Region
    encoder_block: Region
    encoder_after: Region
    decoder_before: Region
    decoder_block: Region
    decoder_after: Region
    decoder_penalties: Region
    decoder_sampling: Region
    decoder_beams: Region

    def __iter__(self) -> Iterator[Region]:
        return iter(
            (
                self.encoder_before,
                self.encoder_block,
                self.encoder_after,
                self.decoder_before,
                self.decoder_block,
                self.decoder_after,
                self.decoder_penalties,
                self.decoder_sampling,
                self.decoder_beams,
            )
        )


def build_regions(config: ModelConfig) -> Regions:
    """The regions of a checkpoint's dimensions."""
    vision, decoder = config.vision, config.decoder
    rows = ("tokens", "positions", "forced")
    caches = ("key_cache", "value_cache", "cross_key", "cross_value")
    scores = ("logits", "normalised", *rows, "ends", "key_cache", "value_cache")
    relative = isinstance(vision, BeitConfig) and vision.relative
    before, block, after = _decoder_weights(decoder)

    def region(name: str, inputs: tuple[str, ...], weight_names: tuple[str, ...] = (), layers: int = 1) -> Region:
        component: Component = "encoder" if name.startswith("encoder") else "decoder"
        return Region(name, component, partial(_function, config, name), inputs, weight_names, layers)

    return Regions(
        region("encoder_before", ("pixels",), weights.VIT_EMBED),
        region(
            "encoder_block",
            ("hidden",),
            weights.VIT_BLOCK + (weights.VIT_RELATIVE if relative else ()),
            vision.num_layers,
        ),
        region(
            "encoder_after",
            ("hidden", "slots", "key_cache", "value_cache"),
            (
                *(weights.CROSS_NORM if vision.final_norm else ()),
                *weights.CROSS_KV,
                *(weights.CROSS_PROJECTION if config.projected else ()),
            ),
        ),
        region("decoder_before", ("tokens", "positions"), before),
        region("decoder_block", ("hidden", "positions", *caches), block, decoder.num_layers),
        region("decoder_after", ("hidden", *rows), after),
        region(names.PENALTIES, ("logits", *rows, *PENALISE_INPUTS)),
        region(names.SAMPLING, ("logits", *rows, *SAMPLE_INPUTS, "sequences")),
        region(names.BEAMS, (*scores, *SELECT_INPUTS)),
    )


def _function(config: ModelConfig, name: str) -> "RegionFunction":
    from snapcap.models.regions.functions import region_functions  # noqa: PLC0415  it imports torch

    return region_functions(config)[name]


def _decoder_weights(decoder: DecoderConfig) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Of the regions before the blocks, of a block, and after them."""
    match decoder:
        case Gpt2Config():
            return weights.GPT2_EMBED, weights.GPT2_BLOCK, weights.GPT2_HEAD
        case BertConfig():
            norm = weights.BERT_EMBED_NORM if decoder.embedding_norm else ()
            transform = weights.BERT_TRANSFORM if decoder.head_activation else ()
            return weights.BERT_EMBED + norm, weights.BERT_BLOCK, transform + weights.BERT_HEAD
    raise TypeError(type(decoder).__name__)


def region_inputs(region: Region, config: ModelConfig, state: DecodeState[B], rows: int) -> tuple[B, ...]:
    """Activations and caches of the region for a bucket of ``rows``, in its order: static views of ``state``
    where the runner passes these, fresh zeros for what one region hands to the next.

    Used wherever a region is compiled or checked alone; its weights follow in ``weight_names`` order.
    """
    memory, dtype = state.memory, state.dtype
    vision, width = config.vision, config.decoder.hidden_size
    if region.name == "encoder_before":
        return (memory.zeros("uint8", (rows, *vision.image_size, 3)),)
    if region.component == "encoder":
        hidden = memory.zeros(dtype, (rows, vision.sequence_length, vision.hidden_size))
        slots = memory.zeros("int64", (rows,))
        memory.write(slots, range(rows), np.arange(rows))
        caches = (slots, state.cross_key, state.cross_value)
        return (hidden,) if region.name == "encoder_block" else (hidden, *caches)
    if region.name == "decoder_before":
        return state.rows(("tokens", "positions"), rows)
    if region.on_demand:
        vocabulary = config.decoder.vocab_size
        logits, ends = memory.zeros("float32", (rows, vocabulary)), memory.zeros("bool", (vocabulary,))
        beams = BeamState.allocate(state.slots, state.cache_length, memory)
        scores = (logits, memory.view(ends, slice(1))) if region.name == names.BEAMS else (logits,)
        return (*scores, *choice_inputs(region.name, state, beams, ends, rows))
    hidden = memory.zeros(dtype, (rows, width))
    if region.name == "decoder_block":
        layer = state.layers(rows)[0]
        positions = state.rows(("positions",), rows)
        return (hidden, *positions, layer.key, layer.value, layer.cross_key, layer.cross_value)
    return (hidden, *state.rows(("tokens", "positions", "forced"), rows))


def choice_inputs(name: str, state: DecodeState[B], beams: BeamState[B], ends: B, rows: int) -> tuple[B, ...]:
    """What a region that chooses tokens takes after the scores of ``rows``; ``ends`` [V] bool, as
    `beam_search.select` has it. Views of the buffers."""
    own = state.rows(("tokens", "positions", "forced"), rows)
    match name:
        case names.PENALTIES:
            return (*own, *beams.inputs(PENALISE_INPUTS, rows))
        case names.SAMPLING:
            return (*own, *state.rows(SAMPLE_INPUTS, rows), beams.sequences)
        case names.BEAMS:
            return (*own, ends, state.key, state.value, *beams.inputs(SELECT_INPUTS, rows))
    raise ValueError(name)
