"""The builder over children that only say they compile: what they leave out must not look made."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from warmup.build import Builder, Event
from warmup.child import ChildError
from warmup.options import StartOptions, StoreOptions
from warmup.plan import make_plan
from warmup.prepare import read_checkpoint


class FakeChild:
    """Stands for compiler and checker; writes a package where ``write`` says so."""

    write = True
    crash = ""

    environments: ClassVar[dict[str, dict[str, str]]] = {}

    def __init__(self, module: str, job: Mapping[str, Any], environment: Mapping[str, str], _nice: int) -> None:
        self.module, self.folder = module, Path(job["folder"])
        self.environments[module] = dict(environment)
        self.alive = False

    def start(self) -> None:
        self.alive = True

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        entry = f"aot/{task['region']}.b{task['size']}.pt2"
        if self.module == "warmup.check_worker":
            if entry == self.crash:
                self.alive = False
                raise ChildError("ended with signal 11")
            return {"entry": entry, "difference": 0.0}
        if self.write:
            path = self.folder / entry
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(entry.encode())
        return {"entry": entry, "signature": [["float32", [1], [1]]], "seconds": 1.0}

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``build(device, write=True, crash="")`` -> a builder of the demo's bucket 1, its events, its folder."""

    def make(device: str = "cpu", **behaviour: Any) -> tuple[Builder, list[Event], Path]:
        monkeypatch.setattr("warmup.build_children.Child", type("Child", (FakeChild,), behaviour))
        monkeypatch.setattr("warmup.build.require_compiler", lambda: "g++")
        options = StartOptions("demo", tmp_path, StoreOptions(tmp_path), buckets=(1,))
        checkpoint = read_checkpoint(options)
        events: list[Event] = []
        plan = replace(make_plan(checkpoint.config, options), device=device)
        folder, more = tmp_path / "b", {"MORE": "1"}
        builder = Builder(checkpoint, plan, folder, workers=2, on_event=events.append, environment=more)
        return builder, events, folder

    return make


def test_all_packages_are_made_and_a_second_run_keeps_them(build: Any) -> None:
    builder, events, _ = build()
    built = builder.run()
    assert built.complete
    assert set(built.files) == {task.entry for task in builder.tasks} == set(built.signatures)
    assert [event.kind for event in events].count("built") == len(builder.tasks) == 7
    again, events, _ = build(write=False)
    assert again.run().complete
    assert {event.kind for event in events} == {"kept"}


def test_a_package_that_is_not_where_it_should_be_is_a_failure(build: Any) -> None:
    builder, events, _ = build(write=False)
    built = builder.run()
    assert not built.complete
    assert built.files == {}
    assert set(built.failures) == {task.entry for task in builder.tasks}
    assert all(reason.startswith("record: ") for reason in built.failures.values())
    assert [event.kind for event in events].count("failed") == len(builder.tasks)


def test_a_package_that_crashes_its_self_check_is_reported_and_the_rest_goes_on(build: Any) -> None:
    builder, _, folder = build(crash="aot/decoder_block.b1.pt2")
    built = builder.run()
    assert built.failures == {"aot/decoder_block.b1.pt2": "self-check: ended with signal 11"}
    assert len(built.files) == len(builder.tasks) - 1
    assert not (folder / "aot" / "decoder_block.b1.json").exists()
    again, events, _ = build()
    assert again.run().complete
    assert sorted(event.kind for event in events) == ["built", "compiled", *["kept"] * (len(again.tasks) - 1)]


def test_a_package_that_is_called_on_demand_may_fail(build: Any) -> None:
    builder, events, _ = build(crash="aot/decoder_beams.b1.pt2")
    built = builder.run()
    assert built.complete
    assert set(built.failures) == {"aot/decoder_beams.b1.pt2"}
    assert [event.task.on_demand for event in events if event.kind == "failed"] == [True]
    assert builder.is_settled("decoder", 1)
    assert builder.is_settled("encoder", 1)


def test_a_package_that_every_start_needs_must_not_fail(build: Any) -> None:
    builder, _, _ = build(crash="aot/decoder_after.b1.pt2")
    assert not builder.run().complete
    assert not builder.is_settled("decoder", 1)


def test_a_package_that_was_changed_after_its_check_is_made_again(build: Any) -> None:
    builder, _, folder = build()
    builder.run()
    (folder / "aot" / "encoder_block.b1.pt2").write_bytes(b"other")
    again, events, _ = build()
    assert again.run().complete
    assert [event.task.entry for event in events if event.kind == "built"] == ["aot/encoder_block.b1.pt2"]


def test_an_error_of_a_listener_is_not_swallowed(build: Any) -> None:
    builder, _, _ = build()

    def broken(event: Event) -> None:
        raise RuntimeError("listener")

    builder._on_event = broken
    with pytest.raises(RuntimeError, match="listener"):
        builder.run()


def test_more_variables_are_for_the_compilers_alone(build: Any) -> None:
    build()[0].run()
    environments = FakeChild.environments
    assert environments["warmup.build_worker"]["MORE"] == "1"
    assert environments["warmup.build_worker"]["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert environments["warmup.check_worker"] == {"AOTI_RUNTIME_CHECK_INPUTS": "1"}


def test_compilers_for_a_gpu_have_cache_folders_of_their_own_which_end_with_them(build: Any) -> None:
    builder, _, _ = build()
    builder.run()
    assert "TORCHINDUCTOR_CACHE_DIR" not in FakeChild.environments["warmup.build_worker"]
    seen: list[Path] = []
    builder, _, _ = build(device="cuda:0", write=True)
    original = builder._on_event

    def on_event(event: Event) -> None:
        if event.kind == "compiled" and not seen:
            seen.append(Path(FakeChild.environments["warmup.build_worker"]["TORCHINDUCTOR_CACHE_DIR"]))
            assert seen[-1].is_dir()
        original(event)

    builder._on_event = on_event
    for record in builder._folder.rglob("*.json"):  # those of the first run
        record.unlink()
    assert builder.run().complete
    assert seen
    assert not any(folder.exists() for folder in seen)
