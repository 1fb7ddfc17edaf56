"""The device thread and the thread that opens the packages of cold buckets beside it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes.list_engine import PATIENCE, Served, result

from snapcap.service.engine.device_thread import DeviceThread
from snapcap.service.errors import BeamsNotReady
from snapcap.service.readiness import BackgroundWork
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline


@pytest.mark.parametrize("step", ["prepare", "warm_aside"])
def test_a_bucket_is_given_up_on_the_device_thread(step: str) -> None:
    """This thread collects the errors of requests, and sends them at the end of its turn."""
    served, status = Served(cold=(8,)), StartupStatus()
    status.update("decoder", 8, "pending", "aot")
    search = served.send(1, num_beams=8)
    threads: list[threading.Thread] = []
    search.future.add_done_callback(lambda _: threads.append(threading.current_thread()))

    def fail(*_: object) -> None:
        raise OSError("a damaged package")

    warmer: Any = SimpleNamespace(components=lambda _: ("decoder",), prepare=lambda *_: None, warm_aside=fail)
    setattr(warmer, step, fail)
    loaded: Any = SimpleNamespace(cold=(Bucket(8),), warmer=warmer, backend=None)
    nothing: Any = lambda *_: None  # noqa: E731
    thread = DeviceThread(StartOptions(), Timeline.since_exec(), status, nothing, nothing, nothing)
    work = BackgroundWork(lambda _: None)
    thread._warm_cold(served.engine, loaded, served.scheduler, work)
    assert isinstance(search.future.exception(PATIENCE), BeamsNotReady)
    assert threads == [served.thread]
    served.engine.call(lambda: None).result(PATIENCE)
    assert status.bucket("decoder", 8).state == "failed"
    assert result(served.send(2, max_new_tokens=1)).tokens == (200,)
    work.end()
    served.engine.stop()
    served.outcome.result(PATIENCE)
