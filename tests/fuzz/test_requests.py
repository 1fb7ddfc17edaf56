"""Requests of clients beside each other in one batch: whatever one of them asks for, the others get their captions.

Each family has a tokenizer that knows more tokens than the model has rows.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.attacks.fuzzing import fuzzed
from support.checkpoints import random_captioners, random_pairs
from support.checkpoints.chat_files import LLAVA_TEMPLATE, TEMPLATE, write_chat_files
from support.checkpoints.florence2_files import write_florence2
from support.checkpoints.tokenizer_cases import byte_level_bpe
from support.parity.parity import build_runner, random_images

from snapcap.models.config import ModelConfig
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.service.captioning.model_defaults import ModelDefaults
from snapcap.service.captioning.options import CaptionOptions, options_from_json, schema
from snapcap.service.engine.engine import Engine
from snapcap.service.engine.request import CaptionRequest, Completion, Limits
from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.errors import BadRequest, EngineFailed
from snapcap.warmup.plan.plan import BucketTable

TABLE = BucketTable.of((1, 4, 8))
PATIENCE = 60.0
CACHE = 48
ROWS = 300  # of a model, which its tokenizer has more of
TEXTS = ("a dog on a red chair", "two people in the rain", "Can you describe this image?")
# Tokens of tokenizers and templates, written as text; the first three are beyond the rows of each model.
MARKS = (
    *("[PAD]", "[BEYOND]", "[BEYOND][PAD]"),
    *("<image>", "<|im_end|>", "<fake_token_around_image>", "<end_of_utterance>", "<s>", "</s>", "<pad>", "<mask>"),
    *("<|endoftext|>", "\x00", "\ud7ff", "é", "🐕🏽", " ", "\n", "a" * 50, "dog " * 40, "z" * 10_000),
)


def _gpt2() -> Any:
    specials = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.GPT2Config(vocab_size=ROWS, n_positions=64, n_embd=48, n_layer=2, n_head=3, **specials)


def _pair(decoder: Callable[[], Any]) -> Callable[[Path], None]:
    return _plain(lambda: random_captioners.pair(random_pairs.vit(), decoder()))


def _plain(make: Callable[[], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        make().save_pretrained(folder)
        byte_level_bpe(TEXTS, ["<s>", "<pad>", "</s>", "<mask>"]).save(str(folder / "tokenizer.json"))

    return write


def _chat(make: Callable[..., Any], template: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        count = write_chat_files(folder, template)
        make(text={"vocab_size": count - 3}).save_pretrained(folder)  # without the last pieces of its texts

    return write


FAMILIES: dict[str, Callable[[Path], None]] = {
    "gpt2": _pair(_gpt2),
    "bert": _pair(lambda: random_pairs.bert(vocab_size=ROWS)),
    "roberta": _pair(lambda: random_pairs.roberta(vocab_size=ROWS)),
    "trocr": _pair(lambda: random_pairs.trocr(vocab_size=ROWS)),
    "blip": _plain(lambda: random_captioners.blip(text={"vocab_size": ROWS})),
    "git": _plain(lambda: random_captioners.git(text={"vocab_size": ROWS})),
    "florence2": lambda folder: write_florence2(
        folder, {"vocab_size": 360, "d_model": 40, "max_position_embeddings": 192}, seed=0
    ),
    "smolvlm": _chat(random_captioners.smolvlm, TEMPLATE),
    "llava": _chat(random_captioners.llava, LLAVA_TEMPLATE),
}


class Served:
    """A model behind an engine, and what it makes of good requests alone."""

    def __init__(self, folder: Path) -> None:
        tokenizer, config = Tokenizer.from_folder(folder), ModelConfig.from_folder(folder)
        assert tokenizer.vocab_size > config.decoder.vocab_size
        generation = config.generation
        limits = Limits(
            cache_length=CACHE,
            default_new_tokens=8,
            eos_ids=frozenset(generation.eos_ids),
            forced_end=generation.forced_eos_id is not None,
            prompt_read=config.decoder.text_tokens if config.decoder.reads_prompt else 0,
        )
        self.tokenizer, self.config = tokenizer, config
        self.defaults = ModelDefaults(tokenizer, config)
        self.engine = Engine(Scheduler(TABLE, limits))
        runner = build_runner(folder, TABLE, CACHE)
        self._thread = threading.Thread(target=self.engine.run, args=(runner, str), daemon=True)
        self._thread.start()
        self.hostile, *images = random_images(config, 3)
        good = (self.options(max_new_tokens=6), self.options(max_new_tokens=6, num_beams=3, prompt="a dog"))
        self.good = list(zip(good, images, strict=True))
        self.alone = [self.together([each])[0].tokens for each in self.good]

    def close(self) -> None:
        self.engine.stop()
        self._thread.join(PATIENCE)

    @staticmethod
    def options(**values: Any) -> CaptionOptions:
        return options_from_json(values, CaptionOptions())

    def together(self, asked: Sequence[tuple[CaptionOptions, np.ndarray]]) -> list[Completion]:
        """What comes of these requests in one batch. Raises what one of them raises."""
        return [sent.future.result(PATIENCE) for sent in self.sent([self.request(*each) for each in asked])]

    def sent(self, requests: Sequence[CaptionRequest]) -> Sequence[CaptionRequest]:
        """Sends these requests in one batch."""
        release = threading.Event()
        self.engine.call(lambda: release.wait(PATIENCE))
        for request in requests:
            self.engine.submit(request)
        release.set()
        return requests

    def request(self, options: CaptionOptions, image: np.ndarray) -> CaptionRequest:
        asked = self.defaults.resolve(options, self.engine.limits)
        deadline = time.monotonic() + PATIENCE
        future: Future[Completion] = Future()
        return CaptionRequest(
            "fuzz", image, asked.prompt_ids, asked.params, deadline, future, text_ids=asked.text_ids
        )


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["[PAD]"])
    backend.add_tokens(["[BEYOND]"])
    backend.save(str(folder / "tokenizer.json"))
    served = Served(folder)
    yield served
    served.close()


def value(name: str, described: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Of an option: mostly numbers at the edges of what it may be, and some that are none."""
    junk = st.one_of(st.floats(), st.integers(), st.sampled_from((True, None, "never", "1", [], float("nan"))))
    if "anyOf" in described:
        return st.one_of(value(name, described["anyOf"][0]), st.just(-1))
    if "enum" in described:
        return st.one_of(st.sampled_from(described["enum"]), junk)
    if described["type"] == "string":
        return st.one_of(st.just("caption"), st.text(max_size=4))
    low = described.get("minimum", described.get("exclusiveMinimum"))
    high = described["maximum"]
    if described["type"] == "integer":
        edges = (low, low + 1, low + 2, 3, 8, CACHE - 3, CACHE - 2, high - 1, high)
        return st.one_of(st.sampled_from(edges), st.sampled_from(edges), st.integers(low, min(high, 50)), junk)
    edges = (low, high, 5e-324, 1e-320, 1e-45, 1e-38, 1e-5, 0.5, 1 - 1e-16, 1 + 1e-7)
    return st.one_of(st.sampled_from(edges), st.sampled_from(edges), st.floats(low, high), junk)


def requests() -> st.SearchStrategy[dict[str, Any]]:
    prompt = st.lists(st.one_of(st.sampled_from((*MARKS, *TEXTS)), st.text(max_size=8)), max_size=3).map("".join)
    options = [(name, value(name, described)) for name, described in schema().items() if name != "prompt"]
    some = st.lists(st.one_of(*(st.tuples(st.just(name), each) for name, each in options)), max_size=3).map(dict)
    return st.builds(lambda prompt, options: {"prompt": prompt, **options}, prompt, some)


@fuzzed(12)
@given(hostile=st.lists(requests(), min_size=6, max_size=12))
def test_no_request_changes_anothers_tokens(served: Served, hostile: list[dict[str, Any]]) -> None:
    accepted: list[CaptionOptions] = []
    for each in hostile:
        try:
            options = served.options(**each)
            served.defaults.resolve(options, served.engine.limits)
        except BadRequest as error:
            json.dumps(str(error)).encode()  # a reply can be written
        else:
            accepted.append(options)
    first, last = served.good
    good, *rest = served.together([first, *((each, served.hostile) for each in accepted), last])
    assert [good.tokens, rest[-1].tokens] == served.alone


def broken(request: CaptionRequest) -> Iterator[CaptionRequest]:
    """Yields forms of a request that may raise on the device thread: where it is admitted, encoded, put into its
    slot and told. No request of a client is known to have one of these forms."""

    def fail(*_: int) -> None:
        raise RuntimeError("the reply")

    odd: Any = "odd"
    future = request.future
    for changes in (
        {"pixels": request.array[:-1]},
        {"pixels": 1},
        {"text_ids": tuple(range(4096))},
        {"prompt_ids": (3,) * 4096},
        {"params": replace(request.params, temperature=odd)},
        {"params": replace(request.params, temperature=1.0, seed=[])},
        {"params": replace(request.params, repetition_penalty=odd)},
        {"params": replace(request.params, no_repeat_ngram_size=2**70)},
        {"params": replace(request.params, max_new_tokens=odd)},
        {"on_token": fail},
        {"on_admitted": fail},
    ):
        yield replace(request, **{"future": Future(), **changes})
    assert not future.done()


def test_a_request_that_raises_on_the_device_thread_fails_no_other(served: Served) -> None:
    (first, last), options = served.good, served.options(max_new_tokens=4)
    for odd in broken(served.request(options, served.hostile)):
        requests = [served.request(*first), odd, served.request(*last)]
        served.sent(requests)
        assert [requests[at].future.result(PATIENCE).tokens for at in (0, 2)] == served.alone
        assert isinstance(odd.future.exception(PATIENCE), EngineFailed | None)  # None: this model does not read it


def test_a_token_that_the_model_has_no_row_for_is_refused(served: Served) -> None:
    """Under the name of the option, with the token; a chat model takes it for text."""
    for prompt in ("[PAD]", "a [BEYOND] dog", "x" * 8 + "[PAD]"):
        if served.tokenizer.takes_instructions:
            assert (
                max(served.defaults.resolve(served.options(prompt=prompt), served.engine.limits).prompt_ids) < 328
            )
            continue
        with pytest.raises(
            BadRequest, match=r"'prompt' must hold only tokens that the model has: .*\[(PAD|BEYOND)\]"
        ):
            served.defaults.resolve(served.options(prompt=prompt), served.engine.limits)
