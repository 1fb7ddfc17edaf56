"""Holds static buffers of the running rows, indexed by slot. Imports no torch.

`DecodeState` has the K/V caches and the inputs and outputs of a step. `BeamState` has what rows need that are
beams or whose choice depends on their tokens so far; it is allocated when the first request needs it. `TokenRules`
has a checkpoint's rules, which are the same for every row. A step of b rows works on the views ``[:b]``, so
changing the bucket copies nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple

import numpy as np

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS, MAX_PHRASE_TOKENS, MAX_PHRASES
from snapcap.models.memory.memory import B, CopySlots, Memory, row_major

SAMPLE_INPUTS = ("uniforms", "temperature", "top_k", "top_p")
CACHES = ("key", "value", "cross_key", "cross_value")
TEXTS = ("texts", "text")  # names of region inputs: the texts of all slots, and of a step's rows
GRIDS = ("grids", "grid")  # likewise: the grids of the slots' pictures
FEATURES = "features"  # name of a region input: the features of the slots' pictures for one decoder layer


class LayerCache(NamedTuple, Generic[B]):
    """Views of a decoder layer's caches for the first b slots.

    Keys are [b, H, d, L], values [b, H, L, d]. Cross-attention's keys are [b, H, d, T], its values [b, H, T, d].
    """

    key: B
    value: B
    cross_key: B
    cross_value: B


@dataclass(frozen=True)
class DecodeState(Generic[B]):
    """The contents of all slots, for N layers.

    L is the cache length, T the number of tokens of the image and of text encoded with it, H the heads of keys and
    values, P the greatest number of tokens of a text.

    The cross caches hold the K/V of cross-attention, or of a prefix in front of the caption's own tokens. They may
    have another dtype than a row's own K/V. Their last slot is scratch: padding rows of an encoder bucket write
    there, never into a request's slot. If an encode reads the beginning of a prompt, it also writes K/V of the
    row's own tokens. Then `key` and `value` have such a scratch slot too.
    """

    memory: Memory[B]
    slots: int
    cache_length: int
    key: B  # [N, slots, H, d, L], or slots + 1
    value: B  # [N, slots, H, L, d], likewise
    cross_key: B  # [N, slots + 1, H, d, T]
    cross_value: B  # [N, slots + 1, H, T, d]
    tokens: B  # [slots] int64
    positions: B  # [slots] int64
    forced: B  # [slots, L] int64
    uniforms: B  # [slots, L] fp32
    temperature: B  # [slots] fp32
    top_k: B  # [slots] int64
    top_p: B  # [slots] fp32
    # The text that an encode reads beside the image, [slots + 1, P] int64, -1 behind its end. None if no text is
    # read. Its K/V are the last P of the T in the cross caches, or, if the text is a prompt, the first P of a
    # row's own K/V.
    texts: B | None = None
    # Rows and columns of tokens of each slot's picture, and the number of the row's own tokens that stand before
    # the picture, [slots + 1, 3] int64. None if all pictures have one shape.
    grids: B | None = None
    # Features that an encode adds to the output of the first decoder layers, [layers, slots + 1, tokens of an
    # image, hidden size]. None if it adds nothing. Decode steps do not read them.
    features: B | None = None

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        slots: int,
        cache_length: int,
        memory: Memory[B],
        dtype: str,
        cross_dtype: str | None = None,
    ) -> "DecodeState[B]":
        """Returns zeroed buffers. A NaN in uninitialised memory would survive the product after a masked softmax.

        Args:
            slots: number of slots, without scratch.
            cache_length: L, in tokens.
            dtype: of the caches, by its name in torch.
            cross_dtype: of the cross caches; None: ``dtype``.
        """
        vision, decoder, tokens = config.vision, config.decoder, config.prefix_length
        layers, heads, head_dim = decoder.num_layers, decoder.kv_heads, decoder.head_dim
        cross_dtype = cross_dtype or dtype

        def keys(dtype: str, *shape: int) -> B:
            # On CUDA a key is contiguous, because kernels read it whole and the encoder writes it whole.
            *outer, width, length = shape
            *steps, row, column = row_major((*outer, length, width))
            strides = (*steps, column, row) if memory.kind == "cuda" else None
            return memory.zeros(dtype, shape, strides)

        return cls(
            memory=memory,
            slots=slots,
            cache_length=cache_length,
            key=keys(dtype, layers, slots + decoder.reads_prompt, heads, head_dim, cache_length),
            value=memory.zeros(dtype, (layers, slots + decoder.reads_prompt, heads, cache_length, head_dim)),
            cross_key=keys(cross_dtype, layers, slots + 1, heads, head_dim, tokens),
            cross_value=memory.zeros(cross_dtype, (layers, slots + 1, heads, tokens, head_dim)),
            tokens=memory.zeros("int64", (slots,)),
            positions=memory.zeros("int64", (slots,)),
            forced=memory.zeros("int64", (slots, cache_length)),
            uniforms=memory.zeros("float32", (slots, cache_length)),
            temperature=memory.zeros("float32", (slots,)),
            top_k=memory.zeros("int64", (slots,)),
            top_p=memory.zeros("float32", (slots,)),
            texts=memory.zeros("int64", (slots + 1, decoder.text_tokens)) if decoder.text_tokens else None,
            grids=memory.zeros("int64", (slots + 1, 3)) if vision.token_buckets else None,
            features=memory.zeros(dtype, (len(vision.taps), slots + 1, vision.image_tokens, decoder.hidden_size))
            if vision.taps
            else None,
        )

    @property
    def buffers(self) -> dict[str, B]:
        """Returns all buffers that exist, by name."""
        names = [each.name for each in fields(self) if each.name not in ("memory", "slots", "cache_length")]
        return {name: buffer for name in names if (buffer := getattr(self, name)) is not None}

    @property
    def dtype(self) -> str:
        """Returns the dtype of the rows' own caches, in which regions compute."""
        return self.memory.spec(self.key)[0]

    def layers(self, rows: int) -> list[LayerCache[B]]:
        """Returns views of the first ``rows`` slots, one for each decoder layer."""
        caches = [getattr(self, name) for name in CACHES]
        count = self.memory.spec(self.key)[1][0]
        return [
            LayerCache(*(self.memory.view(cache, layer, slice(rows)) for cache in caches)) for layer in range(count)
        ]

    def image_kv(self, layers: slice) -> tuple[B, B]:
        """Returns views of the image's keys [n, slots + 1, H, d, T] and values in some decoder layers."""
        return self.memory.view(self.cross_key, layers), self.memory.view(self.cross_value, layers)

    def own_kv(self, layers: slice) -> tuple[B, B]:
        """Returns views of the rows' own keys [n, slots + 1, H, d, L] and values in some decoder layers."""
        return self.memory.view(self.key, layers), self.memory.view(self.value, layers)

    def rows(self, names: Sequence[str], rows: int) -> tuple[B, ...]:
        """Returns views of the first ``rows`` slots of buffers, by name."""
        return tuple(self.memory.view(getattr(self, name), slice(rows)) for name in names)

    def requested(self, rows: int) -> dict[str, B]:
        """Returns the texts and grids that exist by the names of ``TEXTS`` and ``GRIDS``: all slots, and a view of
        the first ``rows``."""
        found: dict[str, B] = {}
        for names, buffer in ((TEXTS, self.texts), (GRIDS, self.grids)):
            if buffer is not None:
                found |= zip(names, (buffer, self.memory.view(buffer, slice(rows))), strict=True)
        return found

    def features_of(self, layer: int) -> B:
        """Returns a view of the features [slots + 1, tokens of an image, hidden size] of a decoder layer.

        Raises:
            ValueError: encodes add nothing.
        """
        if self.features is None:
            raise ValueError("an encode adds no features")
        return self.memory.view(self.features, layer)

    def write_texts(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Writes the texts that an encode reads beside the images of these slots. An empty text is padding alone.
        Does nothing if encodes read no text."""
        if self.texts is None:
            return
        padded = np.full((len(slots), self.memory.spec(self.texts)[1][1]), -1)
        for row, text in zip(padded, texts, strict=False):
            row[: len(text)] = text
        self.memory.write(self.texts, slots, padded)

    def write_grids(
        self, slots: Sequence[int], grids: Sequence[tuple[int, int]], ahead: Sequence[int] = ()
    ) -> None:
        """Writes the grids of these slots' pictures, and how many of each row's own tokens stand before its
        picture. Does nothing if all pictures have one shape."""
        if self.grids is not None:
            rows = zip(grids, ahead or [0] * len(grids), strict=True)
            self.memory.write(self.grids, slots, np.array([(*grid, tokens) for grid, tokens in rows], np.int64))

    def zeroed(self) -> "DecodeState[B]":
        """Returns zeroed buffers of the same shapes, strides, dtypes and device."""
        buffers = {name: self.memory.zeros(*self.memory.spec(buffer)) for name, buffer in self.buffers.items()}
        return DecodeState(self.memory, self.slots, self.cache_length, **buffers)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the contents of each source slot to its target slot. The moves may happen in any order.

        Raises:
            ValueError: a slot is both source and target, or twice a target.
        """
        if len({*sources, *targets}) != len({*sources}) + len(targets):
            raise ValueError(f"moves from {sources} to {targets} overlap")
        self._copy(sources, targets)

    @cached_property
    def _copy(self) -> CopySlots:
        moved = {name: buffer for name, buffer in self.buffers.items() if name != FEATURES}
        return self.memory.copier([(buffer, int(name in CACHES)) for name, buffer in moved.items()])


PENALISE_INPUTS = ("penalised", "penalty", "ngrams", "endings", "firsts", "inside", "sequences")
SELECT_INPUTS = (
    "members",
    "inside",
    "ranks",
    "lasts",
    "divisors",
    "limits",
    "scores",
    "finished",
    "sequences",
    "outcomes",
)


@dataclass(frozen=True)
class RowStart:
    """The settings by which a row's tokens are chosen.

    begun: the tokens that the row has, the start token included.
    first: the position of the first token that is chosen.
    ngrams: the size of the n-grams that must not repeat; 0 is none.
    least: the position before which no end comes.
    end_growth: ``(start, factor)``. The scores of end tokens grow once ``start`` tokens are generated: n tokens
        later by ``factor**n - 1`` times their absolute value.
    """

    begun: Sequence[int]
    first: int
    penalised: bool = False
    penalty: float = 1.0
    ngrams: int = 0
    least: int = 0
    end_growth: tuple[int, float] | None = None

    def endings(self, cache_length: int) -> "np.ndarray[Any, Any]":
        """Returns the row of `BeamState.endings`: [L] fp32."""
        table = np.zeros(cache_length, np.float32)
        if self.end_growth is not None:
            start, factor = self.end_growth
            begin = min(start + len(self.begun), cache_length)
            table[begin:] = [_power(factor, steps) - 1 for steps in range(cache_length - begin)]
        table[: self.least] = float("-inf")
        return table


@dataclass(frozen=True)
class BeamState(Generic[B]):
    """The buffers of a slot beside its caches. L is the cache length, M the greatest number of beams in a group.

    A group is the rows of one request, in any slots. Each row knows all rows of its group, so it can compute the
    whole group's choice and keep its own part.
    """

    memory: Memory[B]
    slots: int
    cache_length: int
    members: B  # [slots, M] int64: the slots of the row's group, by rank; places behind the group hold any slot
    inside: B  # [slots, M] bool: the place belongs to the group; all False if the row is no beam
    ranks: B  # [slots, 2] int64: the row's own rank, and the group's last rank
    lasts: B  # [slots] int64: position of the last token that may be generated
    # [slots, 2, L] fp32: by position, the divisor of a hypothesis that ends there, and of the best still possible
    divisors: B
    limits: B  # [slots] fp32: the search ends if its worst finished score is above this; inf never ends it
    scores: B  # [slots] fp32: log-probability of the row's tokens
    finished: B  # [slots] fp32: score of the group's finished hypothesis with the row's rank; -inf without one
    # [2, slots, L + 1] int64: the rows' tokens, and finished hypotheses, whose last number is their length
    sequences: B
    # [slots, L + 1] int64: the best hypothesis; the last number is its length, or 0 until the search ends
    outcomes: B
    # [slots] bool: the row's token is chosen by scores that the settings below, or the checkpoint's rules, change
    penalised: B
    penalty: B  # [slots] fp32: repetition penalty; 1 is none
    ngrams: B  # [slots] int64: size of the n-grams that must not repeat; 0 is none
    # [slots, L] fp32: by position, growth of an end's score as a share of its absolute value; -inf: no end
    endings: B
    firsts: B  # [slots] int64: position of the first token that is chosen
    # The slots of each group, by each slot of it. The host keeps them, so a move need not read `members` from the
    # device.
    _groups: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, slots: int, cache_length: int, memory: Memory[B]) -> "BeamState[B]":
        """Returns buffers in which no row is a beam or penalised."""
        beams = min(MAX_BEAMS, slots)

        def whole(*shape: int) -> B:
            return memory.zeros("int64", shape)

        def real(*shape: int) -> B:
            return memory.zeros("float32", shape)

        state = cls(
            memory=memory,
            slots=slots,
            cache_length=cache_length,
            members=whole(slots, beams),
            inside=memory.zeros("bool", (slots, beams)),
            ranks=whole(slots, 2),
            lasts=whole(slots),
            divisors=real(slots, 2, cache_length),
            limits=real(slots),
            scores=real(slots),
            finished=real(slots),
            sequences=whole(2, slots, cache_length + 1),
            outcomes=whole(slots, cache_length + 1),
            penalised=memory.zeros("bool", (slots,)),
            penalty=real(slots),
            ngrams=whole(slots),
            endings=real(slots, cache_length),
            firsts=whole(slots),
        )
        everywhere = range(slots)
        memory.write(state.divisors, everywhere, np.ones((slots, 2, cache_length), np.float32))
        memory.write(state.penalty, everywhere, np.ones(slots, np.float32))
        return state

    def inputs(self, names: Sequence[str], rows: int) -> tuple[B, ...]:
        """Returns buffers by name, as views of the first ``rows`` slots. ``sequences`` is returned whole, because
        its slots are in its second dimension."""
        return tuple(
            self.sequences if name == "sequences" else self.memory.view(getattr(self, name), slice(rows))
            for name in names
        )

    def start(self, slots: range, rows: "Sequence[RowStart]") -> None:
        """Starts rows that are greedy or sampled, each with its settings; beams are started too, before `group`."""
        for slot in slots:
            self._groups.pop(slot, None)
        self._write("inside", slots, np.zeros((len(slots), self._beams), np.bool_))
        self._write("penalised", slots, np.array([row.penalised for row in rows]))
        self._write("penalty", slots, np.array([row.penalty for row in rows], np.float32))
        self._write("ngrams", slots, np.array([row.ngrams for row in rows]))
        self._write("firsts", slots, np.array([row.first for row in rows]))
        self._write("endings", slots, np.stack([row.endings(self.cache_length) for row in rows]))
        held = np.zeros((len(rows), self.cache_length + 1), np.int64)
        for place, row in enumerate(rows):
            held[place, : len(row.begun)] = row.begun
        self.memory.write(self.memory.view(self.sequences, 0), slots, held)

    def group(
        self,
        slots: Sequence[int],
        prompt_length: int,
        new_tokens: int,
        length_penalty: float,
        early_stopping: bool | Literal["never"],
    ) -> None:
        """Makes started rows, in these slots, the beams of one request.

        Args:
            prompt_length: number of tokens before generation, the start token included.
            new_tokens: greatest number of tokens to generate.
            early_stopping: as in `_beam_search` of transformers.
        """
        beams = len(slots)

        def put(name: str, value: float | np.ndarray[Any, Any], dtype: Any = np.int64) -> None:
            """Writes the same value for every row of the group."""
            self._write(name, slots, np.array([value] * beams, dtype))

        self._join(slots)
        put("inside", np.arange(self._beams) < beams, np.bool_)
        self._write("ranks", slots, np.array([[rank, beams - 1] for rank in range(beams)]))
        put("lasts", prompt_length + new_tokens - 1)
        far = early_stopping == "never" and length_penalty > 0
        table = _divisors(self.cache_length, prompt_length, new_tokens, length_penalty, far)
        put("divisors", table, np.float32)
        put("limits", float("-inf") if early_stopping is True else float("inf"), np.float32)
        # All beams begin with the same tokens, so only the first beam's continuations may count.
        self._write("scores", slots, np.array([0.0] + [-1e9] * (beams - 1), np.float32))
        put("finished", float("-inf"), np.float32)
        # A search that finds no hypothesis, because all tokens are banned, must end too: its outcome needs a
        # length above 0.
        lengths = self.memory.view(self.sequences, 1, slice(None), self.cache_length)
        self.memory.write(lengths, slots, np.full(beams, prompt_length))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the contents of each source slot to its target slot. No slot may be both. Groups follow their
        rows."""
        self._copy(sources, targets)
        to = dict(zip(sources, targets, strict=True))
        for target in targets:
            self._groups.pop(target, None)
        for group in {self._groups[source] for source in sources if source in self._groups}:
            for slot in group:
                self._groups.pop(slot, None)
            self._join([to.get(slot, slot) for slot in group])

    def _join(self, slots: Sequence[int]) -> None:
        """Records that these slots are a group, by rank."""
        self._groups.update(dict.fromkeys(slots, tuple(slots)))
        padding = [slots[0]] * (self._beams - len(slots))
        self._write("members", slots, np.array([[*slots, *padding]] * len(slots)))

    def _write(self, name: str, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        self.memory.write(getattr(self, name), slots, values)

    @property
    def _beams(self) -> int:
        return min(MAX_BEAMS, self.slots)

    @cached_property
    def _copy(self) -> CopySlots:
        """Copies all buffers except `outcomes`, which a row's next step writes anew."""
        names = [each.name for each in fields(self) if each.name in (*PENALISE_INPUTS, *SELECT_INPUTS)]
        return self.memory.copier(
            [(getattr(self, name), int(name == "sequences")) for name in names if name != "outcomes"]
        )


def _divisors(
    cache_length: int, prompt_length: int, new_tokens: int, length_penalty: float, far: bool
) -> "np.ndarray[Any, Any]":
    """Returns the divisors [2, L] fp32 of a hypothesis's score, by the position of its last token.

    The first row is the number of generated tokens to the power of the penalty. The second row is the divisor of
    the best score that is still possible: the one for ``new_tokens`` tokens if ``far``, else the same as the first
    row.
    """
    lengths = [max(position + 1 - prompt_length, 1) for position in range(cache_length)]
    now = [_power(length, length_penalty) for length in lengths]
    later = [_power(new_tokens, length_penalty)] * cache_length if far else now
    return np.array([now, later], np.float32)


def _power(base: float, exponent: float) -> float:
    """Returns ``base**exponent``, limited to [1e-30, 1e30], so that fp32 can divide or multiply a score by it."""
    try:
        return min(max(float(base**exponent), 1e-30), 1e30)
    except OverflowError:
        return 1e30


RULE_INPUTS = ("ends", "before", "biases", "phrases", "phrase_biases")


@dataclass(frozen=True)
class TokenRules(Generic[B]):
    """Buffers of a checkpoint's rules. Zeroed buffers change no score.

    V is the vocabulary, P ``MAX_PHRASES``, K ``MAX_PHRASE_TOKENS``.
    """

    memory: Memory[B]
    ends: B  # [V] bool: the tokens that end a caption
    before: B  # [V] bool: the tokens in the text before a row's own tokens; every row has the same text there
    biases: B  # [3, V] fp32: added to scores first, added last, and added last to a caption's first token
    phrases: B  # [P, K] int64: sequences of several tokens, right-aligned; -1 in front of them
    phrase_biases: B  # [P] fp32: added to the score of a sequence's last token after its other tokens

    @classmethod
    def allocate(cls, vocabulary: int, memory: Memory[B]) -> "TokenRules[B]":
        """Returns zeroed buffers."""
        return cls(
            memory=memory,
            ends=memory.zeros("bool", (vocabulary,)),
            before=memory.zeros("bool", (vocabulary,)),
            biases=memory.zeros("float32", (3, vocabulary)),
            phrases=memory.zeros("int64", (MAX_PHRASES, MAX_PHRASE_TOKENS)),
            phrase_biases=memory.zeros("float32", (MAX_PHRASES,)),
        )

    def write(
        self,
        ends: Collection[int],
        before: Collection[int],
        biases: Mapping[tuple[int, ...], float],
        suppressed: Collection[int],
        suppressed_first: Collection[int],
    ) -> None:
        """Fills the buffers.

        Args:
            ends: the tokens that end a caption.
            before: the tokens of the text before a row's own tokens.
            biases: by a single token, or by a sequence of several.
            suppressed: tokens that are never chosen.
            suppressed_first: tokens that a caption does not begin with.
        """
        vocabulary = np.arange(self.memory.spec(self.ends)[1][0])
        added = np.zeros((3, len(vocabulary)), np.float32)
        phrases = np.full((MAX_PHRASES, MAX_PHRASE_TOKENS), -1)
        phrases[:, -1] = 0  # the place of no sequence adds 0 to the score of token 0
        phrase_biases = np.zeros(MAX_PHRASES, np.float32)
        place = 0
        for ids, bias in biases.items():
            if len(ids) == 1:
                added[0, ids[0]] = bias
                continue
            phrases[place, -len(ids) :] = ids
            phrase_biases[place] = bias
            place += 1
        added[1, list(suppressed)] = added[2, list(suppressed_first)] = float("-inf")

        def put(buffer: B, values: "np.ndarray[Any, Any]") -> None:
            self.memory.write(buffer, range(len(values)), values)

        put(self.ends, np.isin(vocabulary, [*ends]))
        put(self.before, np.isin(vocabulary, [*before]))
        put(self.biases, added)
        put(self.phrases, phrases)
        put(self.phrase_biases, phrase_biases)

    @property
    def inputs(self) -> tuple[B, ...]:
        """Returns the buffers in the order of ``RULE_INPUTS``."""
        return self.ends, self.before, self.biases, self.phrases, self.phrase_biases
