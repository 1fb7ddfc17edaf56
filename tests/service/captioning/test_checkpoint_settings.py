"""A checkpoint's generation_config against transformers, from the file to the tokens, on random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import LLAVA_TEMPLATE, write_chat_files
from support.parity.beams import search
from support.parity.parity import build_runner, pixel_values, random_images
from support.parity.references import chat_pixels, chat_prompt, florence2_ids

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import MAX_PHRASES
from snapcap.models.fields import ConfigError
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.text import PromptIds
from snapcap.service.captioning.model_defaults import ModelDefaults
from snapcap.service.captioning.options import CaptionOptions, options_from_json
from snapcap.service.engine.request import Limits
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.slot_request import SlotRequest

TABLE = BucketTable.of((1, 4))
NEW_TOKENS = 12
PROMPT = (17, 64, 60)  # none of them stands for an image


def pair() -> Any:
    text = {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3}
    ids = {"bos_token_id": 3, "eos_token_id": 2}
    decoder = transformers.GPT2Config(**text, **ids)
    return random_captioners.pair(transformers.ViTConfig(**random_captioners.VISION), decoder, seed=1)


FAMILIES: dict[str, Any] = {
    "pair": pair,
    "git": lambda: random_captioners.git(seed=1),
    "smolvlm": lambda: random_captioners.smolvlm(seed=1),
    "llava": lambda: random_captioners.llava(seed=1),
    "florence2": lambda: random_captioners.florence2(seed=1),
}


class Ids(Tokenizer):
    """A tokenizer whose prompts are ids already, as text."""

    def __init__(self) -> None:
        pass

    def prompt_ids(self, prompt: str, *_: object) -> PromptIds:  # type: ignore[override]
        return PromptIds(tuple(map(int, prompt.split())))

    def encode(self, text: str) -> tuple[int, ...]:
        return (7, 9)


class Checkpoint:
    """A random model, whose file of settings is written anew for each case; weights are loaded once."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder = family, folder
        if family in ("smolvlm", "llava"):
            write_chat_files(folder, *([LLAVA_TEMPLATE] if family == "llava" else []))
        self.model = FAMILIES[family]()
        self.model.save_pretrained(folder)
        self.specials = {
            name: value
            for name, value in json.loads((folder / "generation_config.json").read_text()).items()
            if name.endswith("token_id") and not name.startswith("forced")
        }
        self.image = random_images(ModelConfig.from_folder(folder), 1)[0]

    def set(self, settings: dict[str, Any]) -> ModelConfig:
        (self.folder / "generation_config.json").write_text(json.dumps(self.specials | settings))
        return ModelConfig.from_folder(self.folder)

    @torch.no_grad()
    def theirs(self, prompt: Sequence[int], **more: Any) -> list[int]:
        """What transformers generates with the files as they are."""
        self.model.generation_config = transformers.GenerationConfig.from_pretrained(self.folder)
        pixels = pixel_values([self.image])
        start = [self.specials.get("decoder_start_token_id", self.specials.get("bos_token_id")), *prompt]
        inputs: dict[str, Any] = {"pixel_values": pixels}
        match self.family:
            case "pair":
                begun = "decoder_input_ids"
            case "florence2":
                begun = "decoder_input_ids"
                inputs["input_ids"] = florence2_ids(self.model, [(7, 9)])
            case "git":
                begun = "input_ids"
            case _:
                begun, start = "input_ids", [*chat_prompt(self.model), *prompt]
                inputs["pixel_values"] = chat_pixels(self.model, [self.image])
        inputs[begun] = torch.tensor([start])
        output = self.model.generate(**inputs, **more)
        return cast(list[int], output[0, len(start) :].tolist())

    def ours(self, prompt: Sequence[int], new_tokens: int | None = NEW_TOKENS, **options: Any) -> list[int]:
        """What is generated for a request that names these options, up to its end."""
        runner = build_runner(self.folder, TABLE, cache_length=64)
        config = runner.config
        generation, defaults = config.generation, ModelDefaults(Ids(), config)
        if new_tokens is not None:
            options["max_new_tokens"] = new_tokens
        given = {"prompt": " ".join(map(str, prompt)), **options}
        asked = options_from_json(given, CaptionOptions(clamp=True))
        limits = Limits(
            64,
            generation.max_length - 1,
            frozenset(),
            prompt_read=config.decoder.text_tokens if config.decoder.reads_prompt else 0,
            default_counts_prompt=generation.counts_prompt,
        )
        resolved = defaults.resolve(asked, limits)
        count = limits.new_tokens(len(resolved.prompt_ids), resolved.params.max_new_tokens)
        text = (7, 9) if self.family == "florence2" else ()
        read = limits.prefilled(len(resolved.prompt_ids))
        row = SlotRequest(resolved.prompt_ids, resolved.params, (), count, text, read)
        (tokens,) = search(runner, TABLE, [(self.image, row)], len(row.prompt) + count)
        forced_end = generation.forced_eos_id in generation.eos_ids and not row.params.searches
        return tokens[: count - forced_end]  # as the scheduler stops a lone row

    def cut(self, tokens: list[int], config: ModelConfig) -> list[int]:
        """Without the end, and what is behind it."""
        ends = config.generation.eos_ids
        return tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def cases(plain: list[int], ends: list[int]) -> dict[str, dict[str, Any]]:
    """Settings that change the greedy tokens ``plain``, by name."""
    first, second, third = plain[:3]
    often = [*ends, second]  # it ends at once, where nothing forbids that
    return {
        "an end": {"eos_token_id": often},
        "min_length": {"eos_token_id": often, "min_length": 9},
        "min_new_tokens": {"eos_token_id": often, "min_new_tokens": 6},
        "min_new_tokens above max_new_tokens": {"eos_token_id": often, "min_new_tokens": 40},
        "min_new_tokens 0 goes before min_length": {"eos_token_id": often, "min_length": 9, "min_new_tokens": 0},
        "suppress_tokens": {"suppress_tokens": [first, second, third, -1]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first, *ends]},
        "bad_words_ids": {"bad_words_ids": [[first], [second, third], [5, 6, 7], [ends[0]]]},
        "sequence_bias": {"sequence_bias": [[[first], -1.5], [[second], 0.75], [[first, second], -9.0]]},
        "a bias and a ban": {"sequence_bias": [[[first], -3.0]], "bad_words_ids": [[second, third], [third]]},
        "repetition_penalty": {"repetition_penalty": 1.6},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "forced_bos_token_id": {"forced_bos_token_id": 11, "begin_suppress_tokens": [first, second]},
        "forced_eos_token_id": {"forced_eos_token_id": ends[0]},
        "forced_eos_token_id in a list": {"forced_eos_token_id": [ends[0]]},
        "a forced last token that is no end": {"forced_eos_token_id": 31},
        "ends that become likelier": {"exponential_decay_length_penalty": [2, 1.6]},
        "beams": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
        "beams that are renormalised": {
            "num_beams": 3,
            "renormalize_logits": True,
            "suppress_tokens": [first, third],
            "eos_token_id": often,
        },
        "everything": {
            "num_beams": 4,
            "eos_token_id": often,
            "min_new_tokens": 3,
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "suppress_tokens": [third],
            "begin_suppress_tokens": [second],
            "bad_words_ids": [[first, 12]],
            "sequence_bias": [[[12], 0.5]],
            "forced_eos_token_id": ends[0],
            "exponential_decay_length_penalty": [4, 1.1],
        },
        "neutral values": {
            **dict.fromkeys(("bad_words_ids", "suppress_tokens", "forced_eos_token_id", "min_new_tokens")),
            **{"min_length": 0, "do_sample": False, "temperature": 1.0, "top_k": 50, "diversity_penalty": 0.0},
            **{"remove_invalid_values": True, "num_beam_groups": 1, "typical_p": 1.0, "guidance_scale": 1},
        },
    }


@pytest.mark.parametrize("prompt", [(), PROMPT], ids=["no-prompt", "prompt"])
def test_settings_give_the_tokens_of_transformers(checkpoint: Checkpoint, prompt: tuple[int, ...]) -> None:
    ends = list(checkpoint.set({}).generation.eos_ids)
    plain = checkpoint.theirs(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    changed = []
    for name, settings in cases(plain, ends).items():
        config = checkpoint.set(settings)
        assert config.generation.not_done == (), name
        # The token that is forced stands before a prompt here, and there where it is given.
        bos = config.generation.forced_bos_id if prompt else None
        given = prompt if bos is None else (bos, *prompt)
        expected = checkpoint.cut(checkpoint.theirs(given, max_new_tokens=NEW_TOKENS), config)
        assert checkpoint.cut(checkpoint.ours(prompt), config) == expected, name
        changed += [] if expected == checkpoint.cut(plain, config) else [name]
    assert len(changed) >= 12, "settings must matter"


def test_lengths_count_what_they_count_in_transformers(checkpoint: Checkpoint) -> None:
    before = len(chat_prompt(checkpoint.model)) if checkpoint.family in ("smolvlm", "llava") else 1
    for settings in ({"max_length": before + 9}, {"max_new_tokens": 7}, {"max_length": 5, "max_new_tokens": 6}):
        for prompt in ((), PROMPT):
            checkpoint.set({**settings, "eos_token_id": 96})
            assert checkpoint.ours(prompt, None) == checkpoint.theirs(prompt), settings


def test_a_request_names_its_own_least_length(checkpoint: Checkpoint) -> None:
    plain = checkpoint.theirs((), max_new_tokens=NEW_TOKENS, eos_token_id=None)
    before = len(chat_prompt(checkpoint.model)) if checkpoint.family in ("smolvlm", "llava") else 1
    config = checkpoint.set({"eos_token_id": [*checkpoint.set({}).generation.eos_ids, plain[1]], "min_length": 4})
    for asked in ({"min_length": before + 7}, {"min_new_tokens": 5}, {"min_new_tokens": 2, "min_length": 99}):
        expected = checkpoint.theirs((), max_new_tokens=NEW_TOKENS, **asked)
        assert checkpoint.cut(checkpoint.ours((), **asked), config) == checkpoint.cut(expected, config), asked


NOT_DONE: dict[str, tuple[dict[str, Any], str]] = {
    "sampling": ({"do_sample": True, "temperature": 0.6, "top_p": 1.0}, "do_sample = true, temperature = 0.6"),
    "guidance": ({"guidance_scale": 3.0}, "guidance_scale = 3.0"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha = 0.6"),
    "groups": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        "diversity_penalty = 0.5, num_beam_groups = 2",
    ),
    "constraints": ({"num_beams": 4, "force_words_ids": [[5]]}, "force_words_ids = [[5]]"),
    "the encoder's text": (
        {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.1},
        "encoder_no_repeat_ngram_size = 2, encoder_repetition_penalty = 1.1",
    ),
    "stops": ({"stop_strings": ["."], "max_time": 2.0}, 'max_time = 2.0, stop_strings = ["."]'),
    "watermark": ({"watermarking_config": {"greenlist_ratio": 0.3}}, "watermarking_config = "),
    "beams": ({"num_beams": 12}, "num_beams = 12"),
    "two forced ends": ({"forced_eos_token_id": [2, 5]}, "forced_eos_token_id = [2, 5]"),
    "many bad words": (
        {"bad_words_ids": [[5, word] for word in range(60)] + [[6, word] for word in range(MAX_PHRASES - 59)]},
        "bad_words_ids = [[5, 0], ",
    ),
    "a long bad word": ({"bad_words_ids": [[5] * 9]}, "bad_words_ids = [[5, 5, "),
}


MEANINGLESS: dict[str, Any] = {
    "min_length": -1,
    "min_new_tokens": 2.5,
    "repetition_penalty": 0,
    "no_repeat_ngram_size": "3",
    "num_beams": 0,
    "early_stopping": "soon",
    "suppress_tokens": 5,
    "begin_suppress_tokens": [True],
    "bad_words_ids": [[5], [10**6]],
    "sequence_bias": {"(5,)": 1.0},
    "forced_bos_token_id": -7,
    "forced_eos_token_id": [10**6],
    "exponential_decay_length_penalty": [3],
    "renormalize_logits": 1,
}


@pytest.mark.parametrize("field", MEANINGLESS)
def test_a_value_that_means_nothing_is_refused_by_name(field: str, demo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((demo_folder / "config.json").read_bytes())
    given = json.loads((demo_folder / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(given | {field: MEANINGLESS[field]}))
    with pytest.raises(ConfigError, match=f"unsupported {field}"):
        ModelConfig.from_folder(tmp_path)


def test_settings_of_config_json_hold_where_there_is_no_file_of_their_own(
    make_captioner: Any, tmp_path: Path
) -> None:
    """As transformers looks for them: the top goes before the decoder's part."""
    make_captioner({}, {}).save_pretrained(tmp_path)
    given = json.loads((tmp_path / "generation_config.json").read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {**given, "min_length": 7, "num_beams": None}
    config["decoder"] |= {"min_length": 3, "num_beams": 2, "do_sample": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    generation = ModelConfig.from_folder(tmp_path).generation
    assert (generation.min_length, generation.num_beams, generation.not_done) == (0, 1, ())
    (tmp_path / "generation_config.json").unlink()
    generation = ModelConfig.from_folder(tmp_path).generation
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path).generation_config
    assert (generation.min_length, generation.num_beams) == (theirs.min_length, theirs.num_beams) == (7, 2)
    assert generation.not_done == ("do_sample = true",)


@pytest.mark.parametrize("name", NOT_DONE)
def test_a_setting_that_is_not_done_is_named(name: str, demo_folder: Path, tmp_path: Path) -> None:
    settings, said = NOT_DONE[name]
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((demo_folder / file).read_bytes())
    given = json.loads((tmp_path / "generation_config.json").read_text())
    assert ModelConfig.from_folder(tmp_path).generation.not_done == ()
    (tmp_path / "generation_config.json").write_text(json.dumps(given | settings))
    named = ", ".join(ModelConfig.from_folder(tmp_path).generation.not_done)
    assert named.startswith(said)
    assert len(named) < len(said) + 100


def test_blip_names_all_settings_as_transformers_reads_none(tmp_path: Path) -> None:
    model = random_captioners.blip(seed=2)
    model.save_pretrained(tmp_path)
    settings = {"min_length": 15, "num_beams": 3, "top_k": 9, "no_repeat_ngram_size": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    runner = build_runner(tmp_path, TABLE)
    assert runner.config.generation.not_done == ("num_beams = 3", "min_length = 15")
    (image,) = random_images(runner.config, 1)
    theirs = type(model).from_pretrained(tmp_path).eval()
    expected = theirs.generate(pixel_values([image]))[0, 1:].tolist()
    params = ModelDefaults(Ids(), runner.config).resolve(CaptionOptions(), Limits(32, 20, frozenset())).params
    (tokens,) = search(runner, TABLE, [(image, SlotRequest((), params))], len(expected))
    assert tokens == expected
