"""The demo model on a real device thread, eager and on the CPU library: requests together give what each gives
alone."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.servers.demo_engine import PATIENCE, Demo, opened

from snapcap.service.engine.request import CaptionRequest
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions


@pytest.fixture(scope="module", params=["eager", "aot"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    compute = ComputeOptions("cpu", backend="eager", threads=1)
    folder = tmp_path_factory.mktemp("cache")
    if request.param == "aot":
        compute = ComputeOptions("cpu", backend="aot", buckets=(1, 4), strict=True)
        folder = request.getfixturevalue("built_cache")
    options = StartOptions(ModelOptions(cache_dir=folder), compute)
    with opened(options) as started:
        assert started.loaded.backend.name == request.param
        assert started.loaded.runner.encodes_beside is (request.param == "aot")
        yield started


@pytest.fixture(scope="module")
def samples(demo_folder: Path) -> dict[Path, str]:
    captions = json.loads((demo_folder / "samples" / "captions.json").read_text())
    return {demo_folder / "samples" / name: caption for name, caption in captions.items()}


def test_every_sample_is_captioned_right_alone(demo: Demo, samples: dict[Path, str]) -> None:
    for image, caption in samples.items():
        completion = demo.run(demo.request(image))
        assert demo.tokenizer.decode(completion.tokens) == caption
        assert (completion.finish_reason, completion.backend) == ("stop", demo.loaded.backend.name)
        assert min(completion.encode_s, completion.decode_s) > 0
    assert {bucket for bucket, _ in demo.observer.encodes} == {1}


def test_mixed_requests_together_give_what_each_gives_alone(demo: Demo, samples: dict[Path, str]) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"prompt": "a large"},
        {"temperature": 1.5, "seed": 4},
        {"max_new_tokens": 3},
        {"prompt": "two small", "temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 9},
        {"prompt": "gray", "max_new_tokens": 1},
        {"temperature": 0.8, "seed": 1, "max_new_tokens": 30},
        {"num_beams": 4},
        {"num_beams": 3, "prompt": "a small", "no_repeat_ngram_size": 2, "length_penalty": 2.0},
        {"repetition_penalty": 1.4},
        {"num_beams": 2, "early_stopping": True, "repetition_penalty": 1.2, "max_new_tokens": 5},
        {"temperature": 1.1, "seed": 3, "no_repeat_ngram_size": 1},
    ]
    wanted = [
        (image, kinds[(at + shift) % len(kinds)]) for shift in (0, 3, 5, 8) for at, image in enumerate(samples)
    ]
    alone = [demo.run(demo.request(image, **kind)) for image, kind in wanted]
    demo.observer.steps.clear()
    together = demo.together(*(demo.request(image, **kind) for image, kind in wanted))
    for completion, expected in zip(together, alone, strict=True):
        assert (completion.tokens, completion.finish_reason) == (expected.tokens, expected.finish_reason)
    largest = demo.loaded.plan.table.largest.size
    assert max(rows for _, rows in demo.observer.steps) == largest, "they must have run together"
    assert any(rows < bucket for bucket, rows in demo.observer.steps), "and some steps must have been padded"


def test_lengths_prompts_and_seeds_have_their_effect(demo: Demo, samples: dict[Path, str]) -> None:
    image = next(iter(samples))
    short = demo.run(demo.request(image, max_new_tokens=3))
    assert (len(short.tokens), short.finish_reason) == (3, "length")
    prompt = demo.request(image, "a large green")
    text = demo.tokenizer.decode([*prompt.prompt_ids, *demo.run(prompt).tokens])
    assert text.startswith("a large green")
    sampled = [demo.run(demo.request(image, "gray", temperature=2.0, seed=seed)).tokens for seed in (1, 1, 2, 3, 4)]
    assert sampled[0] == sampled[1]
    assert len(set(sampled)) > 1


def test_the_longest_prompt_leaves_one_free_token(demo: Demo, samples: dict[Path, str]) -> None:
    image = next(iter(samples))
    limits = demo.engine.limits
    word = demo.tokenizer.encode("a small red circle left of a large blue star on white")
    ids = (word * limits.cache_length)[: limits.max_prompt_tokens]
    free = set()
    for last in dict.fromkeys(word):  # the token that follows must answer to the prompt, not repeat its last one
        request = demo.request(image)
        full = CaptionRequest("p", request.pixels, (*ids[:-1], last), request.params, request.deadline, Future())
        completion = demo.run(full)
        assert len(completion.tokens) + (completion.finish_reason == "stop") == 1
        free.add((last, completion.tokens))
    assert any(tokens != (last,) for last, tokens in free)


def test_a_request_that_is_cancelled_among_others_leaves_them_as_they_are(
    demo: Demo, samples: dict[Path, str]
) -> None:
    release = demo.hold()
    requests = [demo.request(image) for image in samples]
    for request in requests:
        demo.engine.submit(request)
    requests[2].future.cancel()
    release.set()
    for request, caption in zip(requests, samples.values(), strict=True):
        if not request.future.cancelled():
            assert demo.tokenizer.decode(request.future.result(PATIENCE).tokens) == caption
