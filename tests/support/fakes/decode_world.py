"""Plays the decode processes, and what is before and behind them, for tests of decoding in processes."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from support.fakes.list_engine import LIMITS, Observer
from support.fakes.thread_decoder import PLAIN_CONFIG

from snapcap.models.processing.transform import ImageTransform
from snapcap.models.text import PromptIds
from snapcap.service.captioning.captioner import Captioner, CaptionJob, CaptionResult
from snapcap.service.captioning.model_defaults import ModelDefaults
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.config.settings import QueueSettings
from snapcap.service.engine.admission import Admission, Permit
from snapcap.service.engine.remote.client import RemoteEngine
from snapcap.service.engine.remote.messages import Submit
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.images.messages import (
    HEAD,
    Answer,
    Began,
    Decoded,
    Setup,
    pack_answer,
)
from snapcap.service.images.pool import ImageRoom, ProcessImageDecoder
from snapcap.service.ipc.fork import ChildProcess
from snapcap.service.ipc.framing import Unpacker, pack
from snapcap.service.ipc.shared_pixels import SharedPixels, Slots, image_file, write_image
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.timeline import Timeline

QUEUE, PROCESSES = 4, 2
MEMORY, MOST_S = 4000, 1e9
SIZE = (2, 2)  # height and width of an image
SLOTS = QUEUE + PROCESSES + 1
COMPLETION = Completion((7,), "stop", "aot", 0.1, 0.2, 0.3)


class Played:
    """A decode process as the test plays it."""

    def __init__(self, pid: int, end: socket.socket, file: int) -> None:
        """`file`: of the pixels of one image."""
        end.setblocking(False)
        self.pid, self.end, self.file = pid, end, file
        self._held = b""
        self.room = 0

    def job(self) -> bytes | None:
        """The image that it has, once all of it has come. `room`: bytes of memory that it was granted."""
        with suppress(BlockingIOError):
            while data := self.end.recv(1 << 20):
                self._held += data
        if len(self._held) < HEAD.size:
            return None
        length, self.room = HEAD.unpack_from(self._held)
        image = self._held[HEAD.size :]
        return image if len(image) == length else None

    def answer(self, answer: Answer | None = None) -> None:
        """By default that the image is decoded: its pixels are all its first byte."""
        image = self.job()
        assert image is not None
        if answer is None:
            write_image(self.file, image[:1] * (SIZE[0] * SIZE[1] * 3))
        self._held = b""
        self.end.sendall(pack_answer(answer or Decoded("png", 1.0, 0.5, (3, 2))))

    def die(self) -> None:
        if self.end.fileno() >= 0:
            self.end.close()
            os.close(self.file)


class World:
    """The decoder, what is behind it and what asks it, on the event loop of the test."""

    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.pixels, self.slots = SharedPixels(SLOTS), Slots(SLOTS)
        self.pixels.open(SIZE)
        self.messages: list[Any] = []
        self.engine = RemoteEngine(LIMITS, self.slots, self.messages.append, Observer())
        ours, self.control = socket.socketpair()
        # To be waited for at the end, as the process that forks the others is.
        self.parent = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=-1)
        self.failures: list[Exception] = []
        self.decoder = ProcessImageDecoder(
            ChildProcess(self.parent.pid, ours),
            PROCESSES,
            self.pixels,
            self.slots,
            ImageRoom(MEMORY, PROCESSES),
            MOST_S,
            self.metrics,
            asyncio.get_running_loop(),
            self.failures.append,
        )
        self.admission = Admission(QUEUE)
        self.refusals: dict[str, BaseException | None] = {}
        queue, readiness = QueueSettings(QUEUE, 1e9), Readiness(lambda: "serving")
        self.captioner = Captioner(queue, readiness, self.metrics, Timeline(0.0))
        tokenizer: Any = SimpleNamespace(
            prompt_ids=lambda _: PromptIds(()),
            caption=lambda _, tokens: str(tokens),
            takes_instructions=False,
            takes_conversations=False,
        )
        engine: Any = SimpleNamespace(limits=LIMITS, submit=self._submit)
        self.captioner.attach(engine, "fake", self.decoder, ModelDefaults(tokenizer, PLAIN_CONFIG))
        self.processes: list[Played] = []

    async def begin(self, count: int = PROCESSES) -> None:
        starting = asyncio.create_task(asyncio.to_thread(self.decoder.begin, ImageTransform(SIZE)))
        setups = Unpacker[tuple[Setup, bytes | None]]().feed(await asyncio.to_thread(self.control.recv, 1 << 16))
        assert [(type(setup), library) for setup, library in setups] == [(Setup, None)]
        for _ in range(count):
            self.add()
        await starting
        await turns()

    def add(self) -> None:
        ours, theirs = socket.socketpair()
        number = 1_000_000_000 + len(self.processes)  # above what a system gives
        file = image_file(SIZE)
        socket.send_fds(self.control, [pack(Began(number))], [ours.fileno(), file])
        ours.close()
        self.processes.append(Played(number, theirs, file))

    async def ask(
        self,
        value: int,
        size: int = 10,
        seconds: float = 1e9,
        permit: Permit | None = None,
        raises: BaseException | None = None,
    ) -> "asyncio.Task[CaptionResult]":
        """Begin to caption an image whose pixels will all be of this value. `seconds`: until its deadline. A
        `permit` is released as the request ends. `raises`: the error with which the engine refuses the request."""
        self.refusals[str(value)] = raises

        async def caption() -> CaptionResult:
            with permit or Admission(1).admit() as held:
                image, options = bytes([value]) * size, CaptionOptions(timeout=seconds)
                return await self.captioner.caption(image, options, CaptionJob(str(value), held, CaptionTimes()))

        task = asyncio.create_task(caption())
        await asyncio.sleep(0)
        return task

    def _submit(self, request: CaptionRequest) -> None:
        error = self.refusals[request.id]
        if error is not None:
            raise error
        self.engine.submit(request)

    def working(self) -> list[Played]:
        return [each for each in self.processes if each.end.fileno() >= 0 and each.job() is not None]

    @property
    def submitted(self) -> list[Submit]:
        return [each for each in self.messages if isinstance(each, Submit)]

    def close(self) -> None:
        for each in self.processes:
            each.die()
        assert self.parent.stdin is not None
        self.parent.stdin.close()
        self.control.close()
        self.decoder.family.close()
        self.captioner.close()
        with suppress(ChildProcessError):
            self.parent.wait()


async def turns() -> None:
    """The loop looks at its sockets, calls what is due, and wakes the requests that wait for it."""
    for _ in range(8):
        await asyncio.sleep(0)


def play(scene: "Coroutine[Any, Any, None]") -> None:
    asyncio.run(scene)


def of(world: World, name: str) -> float:
    return getattr(world.metrics, name)._value.get()


def killed_for(world: World) -> dict[str, float]:
    """Returns the number of killed processes by reason."""
    counted = next(iter(world.metrics.decode_processes_killed.collect())).samples
    return {each.labels["reason"]: each.value for each in counted if each.name.endswith("_total") and each.value}
