"""Tests of the HTTP process while the processes of a model start, with processes that are played."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes.list_engine import LIMITS

from snapcap.service.config.settings import Settings
from snapcap.service.engine.remote.messages import ModelLoaded
from snapcap.service.ipc.shared_pixels import Slots
from snapcap.service.server import monitor, rehearsal
from snapcap.service.server.monitor import EngineClient
from snapcap.warmup.plan.checkpoint import Checkpoint


def done(value: object) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_a_model_that_leaves_during_its_start_waits_for_no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine process has loaded the model, and dies while decode processes are rehearsed: nobody would answer
    the rehearsal with the model, which would keep the shared pixels."""
    vision = SimpleNamespace(image_size=(2, 2))
    checkpoint: Any = SimpleNamespace(tokenizer=None, transform=None, config=SimpleNamespace(vision=vision))
    monkeypatch.setattr(Checkpoint, "of", lambda *_: checkpoint)
    client: Any = EngineClient.__new__(EngineClient)
    client.parts = SimpleNamespace(pixels=SimpleNamespace(open=lambda _: None), decoders=1)
    client.settings, client.result, client.loop = Settings(), None, None
    client.services = SimpleNamespace(metrics=SimpleNamespace(worked=lambda _: None))
    client._image_decoder = SimpleNamespace(begin=lambda *_: True, works=True)
    client._channel = SimpleNamespace(send=lambda _: None, has_room=True)
    client._folder, client._image_library = done(None), done(None)
    client._loaded = done(ModelLoaded(LIMITS, rehearses=True))
    client._slots, client._engine, client._closing = Slots(1), None, False
    failed: list[bool] = []

    def rehearse(engine: Any, *_: object) -> None:
        if not isinstance(engine, rehearsal.AnswersAtOnce):
            failed.append(engine._failed)
        client._closing = True  # `leave` finds no engine to fail

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    for name in ("end_on_signal", "return_large_memory"):  # they change this process
        monkeypatch.setattr(monitor, name, lambda *_: None)
    client._prepare()
    assert failed == [True]
