"""Prompts in a process of their own: the same ids as here, and bounds of time, memory and tokens."""

import logging
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from support.attacks.hostile_tokenizer import GROWS, MANY, PANIC, SLOW, write_hostile_tokenizer
from support.checkpoints import qwen3_vl_files
from support.checkpoints.chat_files import write_chat_files

from snapcap.models.processing.chat import read_chat
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.text import Dialogue, ImageMarkup
from snapcap.service.captioning import prompt_worker, prompts
from snapcap.service.captioning.prompts import PromptReader
from snapcap.service.errors import DeadlineExceeded, EngineFailed, InvalidOption, NotReady, PromptTooLong
from snapcap.warmup.machine.worker import Worker

PATIENCE = 60.0
GOOD = "a red"


class Reading:
    """A reader, which is asked and waited for."""

    def __init__(self, reader: PromptReader) -> None:
        self.reader = reader

    def ids(self, prompt: str, most: int = 30, patience: float = PATIENCE) -> tuple[int, ...]:
        return self.reader.read(prompt, most, "the-id", time.monotonic() + patience).result(PATIENCE).ids


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Iterator[Reading]:
    folder = write_hostile_tokenizer(demo_folder, tmp_path_factory.mktemp("hostile"))
    reader = PromptReader(folder, None)
    yield Reading(reader)
    reader.close()


def test_a_prompt_has_the_ids_of_the_tokenizer(hostile: Reading, demo_folder: Path) -> None:
    assert hostile.ids(GOOD) == Tokenizer.from_folder(demo_folder).prompt_ids(GOOD).ids


def test_a_message_has_the_ids_of_the_chat_template(tmp_path: Path) -> None:
    write_chat_files(tmp_path)
    around = "<fake_token_around_image>"
    chat = read_chat(tmp_path, ImageMarkup("<image>", f"{around}<global-img>", around))
    here, reader = Tokenizer.from_folder(tmp_path, chat), PromptReader(tmp_path, chat)
    try:
        for text in ("What is it? <image> é", "x"):
            assert Reading(reader).ids(text, 60) == here.prompt_ids(text).ids
    finally:
        reader.close()


def test_a_conversation_has_the_ids_of_the_chat_template(tmp_path: Path) -> None:
    qwen3_vl_files.write_files(tmp_path)
    chat = read_chat(tmp_path, ImageMarkup(qwen3_vl_files.IMAGE, reads_ahead=True))
    here, reader = Tokenizer.from_folder(tmp_path, chat), PromptReader(tmp_path, chat)
    around = Dialogue((("system", "Be brief."),), (("assistant", "A dog."), ("user", "What colour?")), "Look:")
    try:
        for text, most in product(("", "What is it?"), (300, 20)):
            read = reader.read(text, 300, "the-id", time.monotonic() + PATIENCE, around, most).result(PATIENCE)
            assert read == here.prompt_ids(text, around, most)
            assert 0 < read.ahead < len(read.ids)
            assert (read.moved > most) is (most == 20)
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("prompt", "says", "logged"),
    [
        (PANIC, "'prompt' must be text that the model's tokenizer can read", "retry-limit-in-match over"),
        (GROWS, "'prompt' must take less time and memory", "ended with signal 6"),
        (SLOW, "'prompt' must take less time and memory", "ended with signal 24"),
    ],
    ids=["panics", "grows", "slow"],
)
def test_what_a_tokenizer_fails_at_is_refused_and_logged(
    hostile: Reading,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str,
    says: str,
    logged: str,
) -> None:
    monkeypatch.setattr(prompts, "MOST_S", PATIENCE)  # so that two CPU seconds are over before, on any machine
    with caplog.at_level(logging.WARNING, "snapcap.captioning"), pytest.raises(InvalidOption, match=says):
        hostile.ids(prompt)
    (record,) = caplog.records
    fields = vars(record)["fields"]
    assert fields["request_id"] == "the-id"
    assert logged in fields["error"]
    assert len(hostile.ids(GOOD)) == 2, "the next prompt is read"


def test_tokens_are_counted_before_they_are_handed_on(hostile: Reading) -> None:
    with pytest.raises(PromptTooLong, match="has 1000 tokens; send at most 999"):
        hostile.ids(MANY, 999)
    assert len(hostile.ids(MANY, 1000)) == 1000


def test_a_prompt_whose_time_is_over_is_not_begun_and_does_not_hold_up_the_next(hostile: Reading) -> None:
    with pytest.raises(DeadlineExceeded):
        hostile.ids(GOOD, patience=0)
    slow = hostile.reader.read(SLOW, 30, "slow", time.monotonic() + 0.2)
    assert len(hostile.ids(GOOD)) == 2
    assert isinstance(slow.exception(0), DeadlineExceeded)


def test_a_process_is_renewed_after_so_much_cpu_time_and_cannot_outlast_it(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = PromptReader(demo_folder, None)
    soon = time.monotonic() + 60

    def read() -> int | None:
        assert reader.read("a red", 50, "id", soon).result(60)
        return None if reader._worker is None else reader._worker.pid

    try:
        pid = read()
        assert pid is not None
        assert read() == pid
        (line,) = [each for each in Path(f"/proc/{pid}/limits").read_text().splitlines() if "cpu time" in each]
        assert 60 < int(line.split()[-2]) < 120, "the hard limit, which code of a prompt cannot raise"
        monkeypatch.setattr(prompt_worker, "RENEWED_CPU_SECONDS", 0)
        assert read() is None
        assert read() is None, "the next one is new too, and answers"
    finally:
        reader.close()


def test_a_tokenizer_that_is_gone_is_the_servers_fault(tmp_path: Path) -> None:
    reader = PromptReader(tmp_path, None)
    with pytest.raises(EngineFailed):
        Reading(reader).ids(GOOD)
    reader.close()


def test_prompts_of_a_model_that_leaves_are_not_at_fault(hostile: Reading) -> None:
    """A model whose engine process dies has prompts under way, and its requests get 503."""
    reader = PromptReader(hostile.reader._folder, None)
    soon = time.monotonic() + PATIENCE
    assert reader.read(GOOD, 30, "id", soon).result(PATIENCE)
    read, waits = (reader.read(prompt, 30, "id", soon) for prompt in (SLOW, GOOD))
    while not read.running():
        time.sleep(0.01)
    reader.close()
    for each in (read, waits):
        assert isinstance(each.exception(PATIENCE), NotReady)
    with pytest.raises(NotReady):
        reader.read(GOOD, 30, "id", soon)


def test_no_process_begins_for_a_prompt_once_the_model_has_left(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of the first prompt may leave before the process begins, and the model then too."""
    reader, reached, left = PromptReader(demo_folder, None), threading.Event(), threading.Event()
    make = reader._new_worker

    def new_worker() -> Worker:
        reached.set()
        assert left.wait(PATIENCE)
        return make()

    monkeypatch.setattr(reader, "_new_worker", new_worker)
    read = reader.read(GOOD, 30, "id", time.monotonic() + PATIENCE)
    assert reached.wait(PATIENCE)
    reader.close()
    left.set()
    assert isinstance(read.exception(PATIENCE), NotReady)
    assert reader._worker is None or reader._worker.pid is None
