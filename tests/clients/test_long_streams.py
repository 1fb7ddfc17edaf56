"""Streams of a model that never ends by itself, in a server with one slot."""

import base64
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.servers.server_process import ServerProcess

LONGEST = 1000
TOKENS = "snapcap_generated_tokens_total"


def serve(model: Path, *options: str) -> ServerProcess:
    """One slot, and a cache that holds the longest text."""
    given = ("--model", str(model), "--model-name", "talker", "--cache-length", str(LONGEST + 1), "--buckets", "1")
    # A thousand steps take longer than the usual time limit of a request on a machine that does other work too.
    limits = ("--request-timeout", "240")
    return ServerProcess(*given, *limits, "--backend", "eager", "--cache-dir", str(model / "cache"), *options)


def client_of(process: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_captioner: Callable[..., Any], demo_folder: Path) -> Path:
    """A checkpoint with random weights and no end token."""
    folder = tmp_path_factory.mktemp("talker")
    model = make_captioner({}, {"vocab_size": 393, "n_positions": LONGEST + 8}, eos_token_id=None)
    model.config.decoder.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    for file in (*demo_folder.glob("*token*"), demo_folder / "preprocessor_config.json"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def talker(folder: Path) -> Iterator[ServerProcess]:
    with serve(folder) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def messages(samples: dict[Path, str]) -> list[Any]:
    image = base64.b64encode(next(iter(samples)).read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    return [{"role": "user", "content": parts}]


@pytest.fixture
def ask(talker: ServerProcess, messages: list[Any]) -> Iterator[Callable[..., Any]]:
    with client_of(talker) as client:
        yield lambda **request: client.chat.completions.create(model="talker", messages=messages, **request)


def test_text_arrives_while_it_is_generated(talker: ServerProcess, ask: Callable[..., Any]) -> None:
    def arrives_meanwhile() -> bool:
        """Whether the first text came in the first half of the time, and half of it well before the end: what comes
        all at once comes at the end."""
        started = time.monotonic()
        stream = ask(stream=True, max_tokens=LONGEST, temperature=2, seed=1)
        arrivals = [time.monotonic() - started for chunk in stream if chunk.choices[0].delta.content]
        whole = time.monotonic() - started
        assert len(arrivals) > LONGEST / 4  # a token may be a part of a character, or special
        return arrivals[0] < 0.5 * whole and arrivals[len(arrivals) // 2] < 0.9 * whole

    # Where other work has the CPUs, this client may read late what came early.
    assert any(arrives_meanwhile() for _ in range(10))


def test_a_client_that_leaves_a_stream_frees_the_only_slot(talker: ServerProcess, ask: Callable[..., Any]) -> None:
    before = talker.metrics()[TOKENS]
    stream = ask(stream=True, max_tokens=LONGEST)
    for _ in range(3):
        next(stream)
    stream.close()
    # It waits until the slot is free.
    assert ask(max_tokens=1).usage.completion_tokens == 1
    talker.wait_for(lambda: talker.metrics()["snapcap_requests_in_flight"] == 0)
    after = talker.metrics()
    assert after[TOKENS] - before < LONGEST
    assert after['snapcap_requests_rejected_total{reason="client_disconnected"}'] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_frees_the_slot_too(talker: ServerProcess, ask: Callable[..., Any], stream: bool) -> None:
    text = ask(max_tokens=30).choices[0].message.content
    before = talker.metrics()[TOKENS]
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    reply = ask(stream=stream, max_tokens=LONGEST, stop=stop)
    if stream:
        *_, last = reply
        assert last.choices[0].finish_reason == "stop"
    else:
        assert reply.choices[0].message.content == text[: text.index(stop)].rstrip()
    assert ask(max_tokens=1).usage.completion_tokens == 1
    assert talker.metrics()[TOKENS] - before < LONGEST / 2


def test_a_deadline_in_the_middle_of_a_stream_is_its_last_event(folder: Path, messages: list[Any]) -> None:
    with serve(folder, "--request-timeout", "0.2") as process, client_of(process) as client:
        process.wait_ready()
        while True:
            try:
                stream = client.chat.completions.create(
                    model="talker", messages=messages, stream=True, max_tokens=LONGEST
                )
                break
            except openai.InternalServerError:  # where other work has the CPUs, no token comes in time
                continue
        with pytest.raises(openai.APIError, match="within the time limit") as late:
            list(stream)
        assert late.value.code == "deadline_exceeded"
        process.wait_for(lambda: process.metrics()["snapcap_requests_in_flight"] == 0)
