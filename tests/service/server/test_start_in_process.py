"""The start within one process, as in a replica of Ray's."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from snapcap.service.api.app import Services
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.config.settings import Settings, WatchdogSettings
from snapcap.service.errors import DeadlineExceeded
from snapcap.service.readiness import State
from snapcap.service.server.http_process import assemble
from snapcap.service.server.in_process import start
from snapcap.warmup.options import ComputeOptions, ModelOptions
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.runner import Runner

PATIENCE = 60.0


class Started:
    """A start that is over."""

    def __init__(self, settings: Settings, exits: ExitStack) -> None:
        self.stopped = threading.Event()
        self.services: Services = assemble(settings, Timeline(time.monotonic()))
        exits.callback(self.services.captioner.close)
        exits.callback(start(settings, self.services, self.stopped.set))
        end = time.monotonic() + PATIENCE
        while self.services.readiness.state is State.STARTING:
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as exits:
        yield exits


def settings(folder: Path, model: str = "demo") -> Settings:
    compute = ComputeOptions(device="cpu", backend="eager", buckets=(1,), threads=1)
    return Settings(model=ModelOptions(source=model, cache_dir=folder), compute=compute)


def test_captions_are_served_once_it_is_ready(tmp_path: Path, exits: ExitStack, samples: dict[Path, str]) -> None:
    started = Started(settings(tmp_path), exits)
    services = started.services
    assert services.readiness.state is State.READY
    path, caption = next(iter(samples.items()))
    with services.captioner.admit() as permit:
        result = asyncio.run(services.captioner.caption(path.read_bytes(), CaptionOptions(), "1", permit))
    assert (result.caption, result.backend) == (caption, "eager")
    assert services.status.tier == "eager"
    assert {"ready", "first_caption"} <= services.timeline.marks().keys()
    assert services.registry.get_sample_value("snapcap_queue_depth") == 0
    assert not started.stopped.is_set()


def test_a_checkpoints_settings_hold_and_what_is_not_done_is_named_once(
    tmp_path: Path,
    demo_folder: Path,
    exits: ExitStack,
    samples: dict[Path, str],
    new_client: Callable[[Services], TestClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = next(iter(samples))
    model = tmp_path / "model"
    shutil.copytree(demo_folder, model)
    file = model / "generation_config.json"
    given = {"min_length": 25, "do_sample": True, "stop_strings": ["."]}
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    started = Started(settings(tmp_path, str(model)), exits)
    warnings = [record for record in caplog.records if "not done" in record.message]
    named = ["do_sample = true", 'stop_strings = ["."]']
    assert [record.__dict__["fields"]["settings"] for record in warnings] == [", ".join(named)]
    client = new_client(started.services)
    assert client.get("/startup").json()["settings_not_done"] == named

    def tokens(**options: int) -> int:
        headers = {"Content-Type": "image/png"}
        reply = client.post("/v1/caption", params=options, content=path.read_bytes(), headers=headers)
        return int(reply.json()["tokens"])

    plain = len(samples[path].split())
    assert plain < 20
    assert tokens() >= 24, "with the start token as many as transformers counts"
    assert tokens(min_length=0) < 20
    assert tokens(min_length=0, min_new_tokens=22) >= 22


def test_a_device_thread_that_hangs_fails_the_replica(
    tmp_path: Path, exits: ExitStack, samples: dict[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nobody else would find: its event loop answers whoever asks how it is."""
    release = threading.Event()
    exits.callback(release.set)
    watched = replace(settings(tmp_path), watchdog=WatchdogSettings(timeout=2.0))
    started = Started(watched, exits)
    services = started.services
    time.sleep(3)
    assert services.readiness.state is State.READY, "an idle one is left alone"
    monkeypatch.setattr(Runner, "decode_step", lambda *_: release.wait(PATIENCE))
    path = next(iter(samples))
    with services.captioner.admit() as permit, pytest.raises(DeadlineExceeded):
        asyncio.run(services.captioner.caption(path.read_bytes(), CaptionOptions(timeout=6), "1", permit))
    assert started.stopped.wait(PATIENCE)
    error = services.readiness.error
    assert error is not None
    assert error.startswith("the engine has made no progress for 2 s, while requests wait")
    assert (services.registry.get_sample_value("snapcap_engine_progress_age_seconds") or 0) > 2


def test_a_model_that_cannot_be_served_stops_it_with_a_sentence(tmp_path: Path, exits: ExitStack) -> None:
    started = Started(settings(tmp_path, str(tmp_path / "nowhere")), exits)
    assert started.services.readiness.state is State.FAILED
    assert "nowhere" in str(started.services.readiness.error)
    assert started.stopped.wait(PATIENCE)
