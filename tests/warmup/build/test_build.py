"""The builder over workers that only say they compile: what they leave out must not look made."""

import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import pytest
from support.fakes.passing_time import ModuleClock

from snapcap.warmup.artifacts.manifest import CPU_LIBRARY, IMAGE_LIBRARY, describe
from snapcap.warmup.build.builder import Builder, Built, Event
from snapcap.warmup.build.environment import compiler_environment
from snapcap.warmup.errors import BuildError
from snapcap.warmup.machine.files import locked_alone
from snapcap.warmup.machine.worker import WorkerError, WorkerTimeoutError
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.checkpoint import read_checkpoint
from snapcap.warmup.plan.plan import PlannedJob, make_plan


class FakeWorker:
    """Stands for compiler and checker; writes a package where ``write`` says so."""

    write = True
    crash = ""
    library = "library"  # its content; empty: it cannot be compiled
    needs_libtorch = ""  # this package does not run on the library
    hang: tuple[str, ...] = ()  # these are never compiled
    runs_out: Mapping[str, int] = MappingProxyType({})  # how often each of these runs out of memory
    ran_out: ClassVar[list[str]] = []

    on_library: ClassVar[list[str]] = []  # what was run on it
    on_libtorch: ClassVar[list[str]] = []  # what was checked on torch's own libraries
    environments: ClassVar[dict[str, dict[str, str]]] = {}
    compilers: ClassVar[list[dict[str, str]]] = []

    def __init__(self, module: str, job: PlannedJob, environment: Mapping[str, str], nice: int) -> None:
        self.module, self.folder = module, job.folder
        self.environments[module] = dict(environment)
        if module == "snapcap.warmup.build.compile_worker":
            self.compilers.append(dict(environment))

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, task: Mapping[str, Any], limit: float) -> dict[str, Any]:
        if self.module == "snapcap.warmup.build.library_worker":
            return self._compile_library(task["entry"])
        entry = f"aot/{task['region']}.b{task['size']}.pt2"
        if self.ran_out.count(entry) < self.runs_out.get(entry, 0):
            self.ran_out.append(entry)
            raise WorkerError("CUDA out of memory. Tried to allocate 2.25 GiB.")
        if self.module == "snapcap.warmup.build.check_worker":
            if "on" in task:
                self.on_library.append(entry)
                if entry == self.needs_libtorch:
                    raise WorkerError("undefined symbol: aoti_torch_cpu_conv")
                return {"entry": entry}
            self.on_libtorch.append(entry)
            if entry == self.crash:
                raise WorkerError("ended with signal 11")
            return {"entry": entry, "difference": 0.0, **asdict(describe(self.folder / entry))}
        if entry in self.hang:
            time.sleep(limit)
            raise WorkerTimeoutError(f"took more than {limit:g} s and was ended")
        if self.write:
            path = self.folder / entry
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(entry.encode())
        return {"entry": entry, "inputs": [["float32", [1], [1]]], "seconds": 1.0}

    def _compile_library(self, entry: str) -> dict[str, Any]:
        if not self.library:
            raise WorkerError("the compiler ended with 1")
        path = self.folder / entry
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.library)
        return asdict(describe(path))

    def kill(self) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``build(device, timeout, write=True, …)`` -> a builder of the demo's bucket 1, its events, its folder."""

    def make(
        device: str = "cpu",
        timeout: float = 60,
        device_memory: int | None = None,
        dtype: Literal["float32", "int8"] = "float32",
        step_buckets: tuple[int, ...] = (),
        only_own: bool = False,
        **behaviour: Any,
    ) -> tuple[Builder, list[Event], Path]:
        behaviour.setdefault("on_library", [])
        behaviour.setdefault("on_libtorch", [])
        behaviour.setdefault("ran_out", [])
        monkeypatch.setattr("snapcap.warmup.build.builder.Worker", type("Worker", (FakeWorker,), behaviour))
        monkeypatch.setattr("snapcap.warmup.build.builder.require_compiler", lambda: "g++")
        options = StartOptions(ModelOptions(cache_dir=tmp_path), ComputeOptions(buckets=(1,)))
        checkpoint = read_checkpoint(options)
        events: list[Event] = []
        changes: dict[str, Any] = {"device": device, "dtype": dtype, "step_buckets": step_buckets}
        plan = replace(make_plan(checkpoint.config, options), **changes)
        folder, more = tmp_path / "b", {"MORE": "1"}
        builder = Builder(
            checkpoint,
            plan,
            folder,
            workers=2,
            on_event=events.append,
            environment=more,
            timeout=timeout,
            device_memory=device_memory,
            only_own=only_own,
        )
        return builder, events, folder

    return make


def test_all_packages_are_made_and_a_second_run_keeps_them(build: Any) -> None:
    builder, events, _ = build()
    built = builder.run()
    assert built.complete
    assert set(built.files) == {task.entry for task in builder.tasks} == set(built.input_specs)
    assert [event.kind for event in events].count("built") == len(builder.tasks) == 9
    again, events, _ = build(write=False)
    assert again.run().complete
    assert {event.kind for event in events} == {"kept"}


@pytest.mark.parametrize("only_own", [False, True])
def test_packages_that_a_group_could_have_written_are_built_again_where_signatures_are_needed(
    build: Any, only_own: bool
) -> None:
    """Kubernetes gives a volume to a group (fsGroup) at each mount: a member could put code and its record there,
    which this machine would sign."""
    _, _, folder = build()
    (folder / "aot").mkdir(parents=True)
    assert build(only_own=only_own)[0].run().complete
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
    builder, events, _ = build(only_own=only_own)
    assert builder.run().complete
    assert {event.kind for event in events} == ({"compiled", "built"} if only_own else {"kept"})
    if not only_own:
        return
    for path in (folder, folder / "aot", *folder.rglob("aot/*")):
        assert not path.stat().st_mode & 0o022, path
    again, events, _ = build(only_own=True)
    assert again.run().complete
    assert {event.kind for event in events} == {"kept"}


@pytest.mark.parametrize("name", ["", "aot"])
def test_a_folder_of_another_user_is_not_built_in_where_signatures_are_needed(build: Any, name: str) -> None:
    if os.geteuid():
        pytest.skip("ONLY ROOT CAN GIVE A FOLDER TO ANOTHER USER")
    builder, _, folder = build(only_own=True)
    (folder / "aot").mkdir(parents=True)
    os.chown(folder / name, 4321, -1)
    with pytest.raises(BuildError, match="belongs to another user"):
        builder.run()


def test_two_builds_of_one_folder_take_turns(build: Any) -> None:
    """Otherwise each replaces packages that the other has checked already, and neither can publish its set."""
    builder, events, folder = build()
    stopped, _, _ = build()
    folder.mkdir()
    results: list[Built] = []
    with locked_alone(folder / ".lock") as other:
        assert other
        threads = [
            threading.Thread(target=lambda each=each: results.append(each.run())) for each in (builder, stopped)
        ]
        for thread in threads:
            thread.start()
        stopped.stop()
        threads[1].join(60)
        assert [built.complete for built in results] == [False]
        time.sleep(0.2)
        assert events == []
        assert threads[0].is_alive()
    threads[0].join(60)
    assert results[1].complete


def test_a_step_bucket_has_packages_of_the_decoder_and_may_be_left_out(build: Any) -> None:
    builder, events, _ = build(step_buckets=(8,))
    assert builder.run().complete
    tasks = [task for task in builder.tasks if task.size == 8]
    assert {task.component for task in tasks} == {"decoder"}
    assert [task.on_demand for task in tasks] == [False] * 3 + [True] * 3
    assert len(builder.tasks) == 9 + 6 == [event.kind for event in events].count("built")
    assert builder.is_settled("decoder", 8)
    assert builder._lacking(builder.tasks[0]).endswith("build and serve with --step-buckets none")


def test_the_cpu_library_is_in_a_set_whose_packages_all_run_on_it(build: Any) -> None:
    checked: list[str] = []
    builder, _, folder = build(on_library=checked)
    built = builder.run()
    assert built.complete
    assert {entry: file.path for entry, file in built.libraries.items()} == {
        entry: folder / entry for entry in (CPU_LIBRARY, IMAGE_LIBRARY)
    }
    assert sorted(checked) == sorted(task.entry for task in builder.tasks) == sorted(built.input_specs)
    assert not built.no_libraries


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"needs_libtorch": "aot/encoder_block.b1.pt2"}, "aot/encoder_block.b1.pt2 does not run on it: undefined"),
        ({"library": ""}, "it cannot be compiled: the compiler ended with 1"),
    ],
)
def test_a_set_without_the_cpu_library_is_as_complete(build: Any, behaviour: dict[str, Any], reason: str) -> None:
    built = build(**behaviour)[0].run()
    assert built.complete
    assert not built.failures
    assert CPU_LIBRARY not in built.libraries
    assert built.no_libraries[CPU_LIBRARY].startswith(reason)
    assert (IMAGE_LIBRARY in built.no_libraries) == (behaviour.get("library") == "")
    assert (IMAGE_LIBRARY in built.libraries) != (IMAGE_LIBRARY in built.no_libraries)


def test_packages_of_int8_weights_are_checked_on_the_cpu_library_alone(build: Any) -> None:
    """torch's own product by weights in int8 would take minutes for a check of a large model."""
    on_library, on_libtorch = list[str](), list[str]()
    builder, _, _ = build(dtype="int8", on_library=on_library, on_libtorch=on_libtorch)
    built = builder.run()
    assert built.complete
    assert CPU_LIBRARY in built.libraries
    assert sorted(on_library) == sorted(task.entry for task in builder.tasks)
    assert not on_libtorch


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (
            {"library": ""},
            "self-check: int8 needs the CPU library: it cannot be compiled: the compiler ended with 1",
        ),
        (
            {"needs_libtorch": "aot/encoder_block.b1.pt2"},
            "self-check: int8 needs the CPU library: aot/encoder_block.b1.pt2 does not run on it: undefined symbol",
        ),
    ],
)
def test_a_package_of_int8_weights_fails_where_the_cpu_library_cannot_run_it(
    build: Any, behaviour: dict[str, Any], reason: str
) -> None:
    builder, _, _ = build(dtype="int8", **behaviour)
    built = builder.run()
    assert not built.complete
    assert built.failures["aot/encoder_block.b1.pt2"].startswith(reason)


def test_an_image_library_that_is_missing_is_compiled_beside_packages_of_an_earlier_run(build: Any) -> None:
    assert IMAGE_LIBRARY not in build(library="")[0].run().libraries
    builder, events, _ = build(device="cuda:0")
    assert IMAGE_LIBRARY in builder.run().libraries
    assert {event.kind for event in events} == {"kept"}


@pytest.mark.parametrize("before", ["", "library"])
def test_no_library_is_in_a_set_but_that_which_all_packages_were_run_on(build: Any, before: str) -> None:
    """Packages of an earlier run are run on it, and are not compiled again."""
    _, _, folder = build(library=before)
    build(library=before)[0].run()
    (folder / CPU_LIBRARY).with_suffix(".json").unlink(missing_ok=True)
    checked: list[str] = []
    builder, events, folder = build(library="another", on_library=checked)
    built = builder.run()
    assert {event.kind for event in events} == {"kept"}
    assert built.libraries[CPU_LIBRARY].path.read_text() == "another"
    assert sorted(checked) == sorted(built.input_specs)


def test_a_library_check_that_a_stop_ends_is_made_again(build: Any) -> None:
    """What ended it says nothing of the package."""
    stopping: list[Builder] = []

    def ask(self: FakeWorker, task: Mapping[str, Any], limit: float) -> dict[str, Any]:
        if "on" in task:
            stopping[0].stop()
            raise WorkerError("ended with signal 9")
        return FakeWorker.ask(self, task, limit)

    builder, _, _ = build(ask=ask)
    stopping.append(builder)
    builder.run()
    again, _, _ = build()
    built = again.run()
    assert built.complete
    assert CPU_LIBRARY in built.libraries


def test_a_package_that_is_not_where_it_should_be_is_a_failure(build: Any) -> None:
    builder, events, _ = build(write=False)
    built = builder.run()
    assert not built.complete
    assert built.files == {}
    assert set(built.failures) == {task.entry for task in builder.tasks}
    assert all(reason.startswith("self-check: ") for reason in built.failures.values())
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


def test_a_package_whose_compiler_hangs_has_failed_and_the_rest_goes_on(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapcap.warmup.build.builder.time", ModuleClock())  # the build is not given up meanwhile
    builder, events, _ = build(timeout=1, hang=("aot/decoder_block.b1.pt2",))
    built = builder.run()
    assert not built.complete
    assert built.failures == {"aot/decoder_block.b1.pt2": "compile: took more than 1 s and was ended"}
    assert len(built.files) == len(builder.tasks) - 1
    assert [event.task.entry for event in events if event.kind == "failed"] == ["aot/decoder_block.b1.pt2"]


def test_a_build_that_makes_nothing_any_more_is_given_up(build: Any) -> None:
    names = [task.entry for task in build()[0].tasks]
    made = "aot/encoder_before.b1.pt2"
    builder, _, _ = build(timeout=1, hang=tuple(name for name in names if name != made))
    built = builder.run()
    assert (set(built.files), built.complete) == ({made}, False)
    assert set(built.failures) == set(names) - {made}
    given_up = [name for name, reason in built.failures.items() if reason.endswith("the build was given up")]
    assert given_up, "some were never begun"
    assert "nothing was made in 2 s" in built.failures[given_up[0]]


def test_what_waits_for_something_else_than_its_worker_holds_no_build_up(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a swap on a device thread that hangs, or a disk that is gone."""
    monkeypatch.setattr("snapcap.warmup.build.builder._ENDING_S", 0.1)
    builder, _, _ = build(timeout=1)
    released = threading.Event()
    builder.on_event = lambda event: event.kind == "built" and released.wait(60)
    try:
        assert not builder.run().complete
    finally:
        released.set()


def test_a_build_that_is_stopped_while_it_begins_starts_no_worker(build: Any) -> None:
    builder, events, _ = build()
    builder.stop()
    built = builder.run()
    assert (built.complete, built.files, built.failures, events) == (False, {}, {}, [])


@pytest.mark.timeout(60)  # against for ever
def test_a_record_that_is_no_file_makes_its_package_anew(build: Any) -> None:
    builder, _, folder = build()
    builder.run()
    (folder / "aot" / "encoder_block.b1.json").unlink()
    os.mkfifo(folder / "aot" / "encoder_block.b1.json")
    again, events, _ = build()
    assert again.run().complete
    assert [event.task.entry for event in events if event.kind == "built"] == ["aot/encoder_block.b1.pt2"]


def test_a_build_makes_folders_that_only_its_user_can_write_to(build: Any) -> None:
    builder, _, folder = build()
    umask = os.umask(0o002)
    try:
        builder.run()
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_error_of_a_listener_is_not_swallowed(build: Any) -> None:
    builder, _, _ = build()

    def broken(event: Event) -> None:
        raise RuntimeError("listener")

    builder.on_event = broken
    with pytest.raises(RuntimeError, match="listener"):
        builder.run()


def test_more_variables_are_for_the_compilers_alone(build: Any) -> None:
    build()[0].run()
    environments = FakeWorker.environments
    assert environments["snapcap.warmup.build.compile_worker"]["MORE"] == "1"
    assert environments["snapcap.warmup.build.compile_worker"]["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert set(environments["snapcap.warmup.build.check_worker"]) == {"AOTI_RUNTIME_CHECK_INPUTS", "TMPDIR"}


def test_few_packages_are_made_without_a_precompiled_header(build: Any, tmp_path: Path) -> None:
    """It takes as long as two or three of them."""
    builder, _, folder = build()
    builder.run()
    for region in ("encoder_before", "encoder_after"):
        (folder / "aot" / f"{region}.b1.json").unlink()
    FakeWorker.compilers.clear()
    assert len(build()[0].run().files) == 9
    more = compiler_environment(tmp_path, "cpu", 8, {})
    chosen = [each["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] for each in (*FakeWorker.compilers, more)]
    assert {*chosen[:-1]} == {"0"}
    assert chosen[-1] == "1"


def test_compilers_for_a_gpu_have_cache_folders_of_their_own_which_end_with_them(build: Any) -> None:
    builder, _, _ = build(device="cuda:0", write=True)
    seen: set[Path] = set()
    both = threading.Barrier(2)

    def on_event(event: Event) -> None:
        if event.kind == "compiled" and not seen:
            both.wait(30)  # each compiler has begun
            folders = {Path(each["TMPDIR"]) for each in FakeWorker.compilers}
            assert all(folder.is_dir() for folder in folders)
            both.wait(30)
            seen.update(folders)

    builder.on_event = on_event
    FakeWorker.compilers.clear()
    assert builder.run().complete
    assert len(seen) == len(FakeWorker.compilers) == 2
    assert not any(folder.exists() for folder in seen)


BLOCK = "aot/encoder_block.b1.pt2"


@pytest.mark.parametrize("memory", [None, 1 << 30, 100 << 30])
def test_a_package_that_runs_out_of_memory_is_made_again_alone(build: Any, memory: int | None) -> None:
    builder, events, _ = build("cuda:0", device_memory=memory, runs_out={BLOCK: 1})
    built = builder.run()
    assert built.complete
    assert not built.failures
    assert not [event for event in events if event.kind == "failed"]
    assert [event.task.entry for event in events if event.kind == "built"][-1] == BLOCK


def test_a_package_that_does_not_fit_an_empty_card_says_what_it_needs(build: Any) -> None:
    builder, events, _ = build("cuda:0", device_memory=1 << 30, runs_out={BLOCK: 2})
    built = builder.run()
    assert not built.complete
    assert list(built.failures) == [BLOCK]
    reason = built.failures[BLOCK]
    assert reason.startswith(
        "compile: CUDA out of memory. Tried to allocate 2.25 GiB.; it ran alone and needs up to "
    )
    assert reason.endswith("GiB, and 1.0 GiB were free: a larger GPU is needed")
    assert [event.kind for event in events].count("built") == len(builder.tasks) - 1


def test_a_small_card_has_fewer_workers(build: Any) -> None:
    """Each process takes a context of the card, whether it works or waits."""
    for memory, compilers in ((None, 2), (100 << 30, 2), (1 << 30, 1)):
        environments: list[dict[str, str]] = []
        build("cuda:0", device_memory=memory, compilers=environments)[0].run()
        assert len(environments) == compilers
        shutil.rmtree(build()[2])
