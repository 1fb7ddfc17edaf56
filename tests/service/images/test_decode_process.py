"""What a decode process makes of the bytes that it is sent."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fakes.list_engine import PATIENCE

from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.images.messages import (
    HEAD,
    Answer,
    AnswerReader,
    Broken,
    Decoded,
    Needs,
    Refused,
)
from snapcap.service.images.parent import picture
from snapcap.service.images.worker import answer_images
from snapcap.service.ipc.framing import RECEIVE_BYTES
from snapcap.service.ipc.shared_pixels import image_file

TRANSFORM = ImageTransform(size=(16, 12))
ROOM = 1 << 30
UNBOUNDED: Any = SimpleNamespace(allow=lambda room: None)  # in place of MemoryNet and QuietTiff
LOUD: Any = SimpleNamespace(around=lambda image: nullcontext())


class Process:
    """The loop of a decode process on a thread, and the socket to it."""

    def __init__(self, transform: Any = TRANSFORM) -> None:
        self.file = image_file(TRANSFORM.size)
        self.end, theirs = socket.socketpair()
        self.end.settimeout(PATIENCE)
        self.statuses: list[int] = []

        def run() -> None:
            self.statuses.append(answer_images(theirs, self.file, transform, UNBOUNDED, LOUD))

        self.thread = threading.Thread(target=run)
        self.thread.start()
        self._reader = AnswerReader()

    def answer(self) -> Answer:
        while True:
            for answer in self._reader.feed(self.end.recv(RECEIVE_BYTES)):
                return answer

    def ask(self, image: bytes, room: int = ROOM) -> Answer:
        self.end.sendall(HEAD.pack(len(image), room) + image)
        return self.answer()

    def pixels(self) -> np.ndarray:
        return np.frombuffer(os.pread(self.file, 1 << 20, 0), np.uint8).reshape(*TRANSFORM.size, 3)

    def close(self) -> None:
        os.close(self.file)
        self.end.close()
        self.thread.join(PATIENCE)
        assert self.statuses == [0]


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_pixels_are_in_the_file_and_what_it_took_in_the_answer(process: Process) -> None:
    answer = process.ask(picture())
    assert isinstance(answer, Decoded)
    assert (answer.format, answer.seconds > 0) == ("jpeg", True)
    assert np.array_equal(process.pixels(), TRANSFORM.decode(picture()).pixels)


@pytest.mark.parametrize("data", [b"", b"nonsense", picture()[:2000], b"GIF89a" + bytes(20)])
def test_what_cannot_be_decoded_is_refused_as_by_the_transform(process: Process, data: bytes) -> None:
    with pytest.raises(ImageError) as error:
        TRANSFORM.decode(data)
    assert process.ask(data) == Refused(error.value.reason, str(error.value))
    assert isinstance(process.ask(picture()), Decoded), "and it goes on"


def test_an_image_that_comes_in_pieces_is_put_together(process: Process) -> None:
    image, sent = picture(), HEAD.pack(len(picture()), ROOM) + picture()
    for start in range(0, len(sent), 1001):
        process.end.sendall(sent[start : start + 1001])
    assert isinstance(process.answer(), Decoded)
    assert np.array_equal(process.pixels(), TRANSFORM.decode(image).pixels)


def test_an_image_that_takes_more_than_is_granted_says_how_much(process: Process) -> None:
    needs = process.ask(picture(), 1000)
    assert isinstance(needs, Needs)
    assert not process.pixels().any()
    assert process.ask(picture(), needs.size - 1) == needs
    assert isinstance(process.ask(picture(), needs.size), Decoded)


def test_a_codec_that_gets_no_memory_is_the_images_fault() -> None:
    class Dear:
        def decode(self, data: bytes, room: int) -> Any:
            raise MemoryError

    process = Process(Dear())
    answer = process.ask(b"x")
    process.close()
    assert isinstance(answer, Refused)
    assert answer.reason == "too_large"
    assert "takes more than 1088 MiB of memory" in answer.sentence


def test_an_error_of_ours_is_told_with_its_trace() -> None:
    class Wrong:
        def decode(self, data: bytes, room: int) -> Any:
            raise ZeroDivisionError("a fault of ours")

    process = Process(Wrong())
    answer = process.ask(b"x")
    process.close()
    assert isinstance(answer, Broken)
    assert "ZeroDivisionError: a fault of ours" in answer.trace


@pytest.mark.parametrize("sent", [b"", HEAD.pack(100, ROOM)[:5], HEAD.pack(100, ROOM) + b"half"])
def test_it_ends_with_its_socket_wherever_that_is_cut(sent: bytes) -> None:
    process = Process()
    process.end.sendall(sent)
    process.close()
