"""Runs an engine process without a model: the real scheduler and engine over a device that only waits."""

import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from snapcap.service.config.settings import Settings
from snapcap.service.engine.engine import Engine
from snapcap.service.engine.limits import Limits
from snapcap.service.engine.remote.channel import BlockingChannel
from snapcap.service.engine.remote.messages import Cancel, Submit
from snapcap.service.engine.remote.server import EngineServer
from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.warmup.plan.buckets import Bucket, BucketTable

TOKENS = 20
END, WORD = 1, 5
TABLE = BucketTable.of((1, 4, 16, 64))
IMAGE_SIZE = (224, 224)
LIMITS = Limits(cache_length=64, default_new_tokens=TOKENS, eos_ids=frozenset({END}))


class WaitingRunner:
    """A device that takes ``step_s`` seconds a step and nothing for an encode, while the host goes on."""

    runs_ahead = True

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free = 0.0

    def timer(self) -> "WaitingRunner":
        return self

    def stop(self) -> "WaitingRunner":
        return self

    def seconds(self) -> float:
        return self._step_s

    def encode(self, bucket: Bucket, images: list[Any], first: int, texts: Any = ()) -> None: ...

    def admit(self, first: int, rows: list[Any]) -> None: ...

    def move(self, moves: list[tuple[int, int]]) -> None: ...

    def decode_step(self, bucket: Bucket, needs: object) -> None:
        self._free = max(self._free, time.perf_counter()) + self._step_s

    def read_tokens(self, rows: int, beams: bool) -> "WaitingTokens":
        return WaitingTokens(self._free, rows)


@dataclass(frozen=True)
class WaitingTokens:
    """The tokens of a step that ends at a moment of ``time.perf_counter``."""

    end: float
    rows: int

    def result(self) -> list[int]:
        time.sleep(max(self.end - time.perf_counter(), 0.0))
        return [WORD] * self.rows

    def hypotheses(self) -> dict[int, list[int]]:
        return {}


class Words:
    """A tokenizer whose every caption is one word."""

    def encode(self, text: str) -> list[int]:
        return [WORD] * len(text.split())

    def decode(self, ids: list[int]) -> str:
        return "caption"


def serve_waiting(
    step_s: float, settings: Settings, end: socket.socket, pixels: SharedPixels, _origin: float, _importing: float
) -> int:
    """An engine process whose device only waits. Its main thread is the device thread."""
    pixels.open(IMAGE_SIZE)
    channel = BlockingChannel(end)
    intake = EngineServer(pixels, channel.send)
    engine = Engine(Scheduler(TABLE, LIMITS), intake.turns, intake.turns.end)
    intake.attach(engine)

    def receive() -> None:
        while (messages := channel.receive()) is not None:
            for message in messages:
                if isinstance(message, Submit):
                    intake.submit(message)
                elif isinstance(message, Cancel):
                    intake.cancel(message.number)
        engine.stop()

    threading.Thread(target=receive, daemon=True).start()
    runner: Any = WaitingRunner(step_s)
    engine.run(runner, lambda rows: "none")
    return 0
