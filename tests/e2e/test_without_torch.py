"""Compiled starts and servers that never import torch's Python module, nor on a CPU load its libraries, and what
they do where they need it."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.servers.server_process import ServerProcess, python

from snapcap.benchmarks.harness.processes import descendants
from snapcap.models.dimensions import ON_DEMAND
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import CPU_LIBRARY, VerifiedFile, open_envelope, seal
from snapcap.warmup.artifacts.signing import OWNER
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.aoti.native import Libtorch
from snapcap.warmup.runtime.aoti.packages import AotiError, Container, region_of
from snapcap.warmup.runtime.torch_model import LoadedModel
from snapcap.warmup.start import native
from snapcap.warmup.start.start import StartedModel, load

TESTS = Path(__file__).parent.parent
PREPARED = {"SNAPCAP_PREPARED_WEIGHTS": "true"}
OPTIONS = (
    "",
    "?num_beams=4",
    "?temperature=0.8&seed=3&top_p=0.9",
    "?repetition_penalty=1.5&no_repeat_ngram_size=2",
    "?num_beams=3&no_repeat_ngram_size=2",
)


def choices(cache: Path, **environment: str) -> dict[str, Any]:
    """What the program prints in a process of its own."""
    arguments = ("-m", "support.programs.choices", str(cache), "cpu", "1,4")
    run = python(*arguments, PYTHONPATH=str(TESTS), **environment)
    assert run.returncode == 0, run.stderr
    printed: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return printed


def test_every_kind_of_request_gets_the_tokens_that_it_gets_with_torch(built_cache: Path) -> None:
    ours = choices(built_cache)
    assert (ours["torch"], ours["mapped"], ours["states"]) == (0, [], ["warm"])
    theirs = choices(built_cache, SNAPCAP_TESTS_WITH_TORCH="1")
    assert theirs["torch"] > 0
    assert ours["tokens"] == theirs["tokens"]
    assert len({json.dumps(each) for each in ours["tokens"].values()}) > len(ours["tokens"]) / 2, "they differ"


def test_no_process_of_a_server_imports_torch(built_cache: Path, samples: dict[Path, str]) -> None:
    options = ("--cache-dir", str(built_cache), "--buckets", "1,4", "--backend", "aot", "--strict")
    with ServerProcess(*options, "--decode-processes", "1", **PREPARED) as server:
        server.wait_ready()
        for path, caption in samples.items():
            for asked in OPTIONS:
                given = server.caption(path, asked)["caption"]
                assert given == caption or asked not in OPTIONS[:2], asked
        startup = server.startup()
        assert (startup["tier"], startup["torch_modules"], startup["weights"]["result"]) == ("aot", 0, "hit")
        assert "import_torch" not in [phase["name"] for phase in startup["phases"]]
        assert server.metrics()["snapcap_torch_modules"] == 0
        pids = (server.process.pid, *descendants(server.process.pid))
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        assert not any(name in mapped for mapped in maps for name in ("/libtorch", "/libgomp"))
        # The engine process has the CPU library; the decode process and its parent have the image library.
        assert sum("/memfd:snapcap-library" in mapped for mapped in maps) == 3


def test_a_set_without_the_cpu_library_runs_on_libtorch(
    built_cache: Path, samples: dict[Path, str], tmp_path: Path
) -> None:
    """As one has it of which a package does not run on the library. Torch's module is not imported for it."""
    cache = tmp_path / "cache"
    shutil.copytree(built_cache, cache)
    store = FolderStore.open(cache / "store")
    (name,) = (path.relative_to(store.root).as_posix() for path in (store.root / "manifests").iterdir())
    found = open_envelope((store.root / name).read_bytes(), OWNER)
    without = {entry: blob for entry, blob in found.entries.items() if entry != CPU_LIBRARY}
    assert len(without) == len(found.entries) - 1
    sealed = seal(dataclasses.replace(found, entries=without), None)
    store.vouch(sealed)
    (store.root / name).write_bytes(sealed)
    with ServerProcess(
        "--cache-dir", str(cache), "--buckets", "1,4", "--backend", "aot", "--strict", **PREPARED
    ) as server:
        server.wait_ready()
        path, caption = next(iter(samples.items()))
        assert server.caption(path)["caption"] == caption
        assert server.startup()["torch_modules"] == 0
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in descendants(server.process.pid)]
        assert any("/libtorch_cpu" in mapped for mapped in maps)


def test_a_server_that_has_torch_says_so(built_cache: Path) -> None:
    with ServerProcess("--cache-dir", str(built_cache), "--buckets", "1,4", "--backend", "eager") as server:
        server.wait_ready()
        assert server.startup()["torch_modules"] > 100
        assert server.metrics()["snapcap_torch_modules"] > 100


def started(cache: Path, **compute: Any) -> StartedModel:
    """A start on this thread, in this process."""
    options = StartOptions(ModelOptions("demo", cache), ComputeOptions("cpu", buckets=(1, 4), **compute))
    return load(options, Timeline.since_exec(), StartupStatus())


def test_packages_are_opened_in_the_order_in_which_buckets_are_warmed(
    built_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first bucket runs while those of the others are still being opened."""
    digests: list[str] = []

    def opened(package: VerifiedFile, device: str, standalone: bool) -> Container:
        assert standalone
        digests.append(package.blob.digest)
        return open_container(package, device, standalone)

    open_container = Container.open
    monkeypatch.setattr(native.Container, "open", opened)
    monkeypatch.setattr(native, "_OPENERS", (1, 1))
    model = started(built_cache)
    assert not isinstance(model.model, LoadedModel)
    assert model.artifacts is not None
    entries = {package.blob.digest: entry for entry, package in model.artifacts.fetched.entries.items()}
    regions = [region_of(entries[digest]) for digest in digests]
    assert [size for _, size in regions] == [1] * 6 + [4] * 6
    assert not ON_DEMAND.intersection(name for name, _ in regions)


class Broken:
    """One part of a start without torch that does not work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch.setattr

    def functions(self) -> None:
        """Of the CPU library, or of libtorch: there is one less."""

        def init(_: Libtorch, __: int, ___: int | None = None) -> None:
            raise AotiError("this libtorch is of another version")

        self._patch(Libtorch, "__init__", init)

    def package(self) -> None:
        """It cannot be mapped."""

        def opened(*_: object) -> Container:
            raise AotiError("it is no package")

        self._patch(native.Container, "open", opened)

    def first_run(self) -> None:
        def run(*_: object) -> None:
            raise AotiError("it failed while it ran")

        self._patch(Container, "run", run)

    def weights(self) -> None:
        """They are of other layers."""

        def check(*_: object) -> None:
            raise ValueError("they have other regions")

        self._patch("snapcap.warmup.start.native.check_weights", check)


@pytest.mark.parametrize("part", ["functions", "first_run", "weights"])
def test_what_does_not_work_without_torch_starts_with_it(
    part: str, built_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(Broken(monkeypatch), part)()
    with caplog.at_level(logging.WARNING, "snapcap.start"):
        model = started(built_cache)
    assert isinstance(model.model, LoadedModel)
    assert model.compiled
    assert "the start needs torch's module after all" in [record.message for record in caplog.records]


def test_where_the_cpu_library_cannot_be_opened_packages_run_on_libtorch(
    built_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(_: VerifiedFile) -> int:
        raise AotiError("the CPU library cannot be opened: it is of another system")

    monkeypatch.setattr(native, "open_cpu_library", opened)
    model = started(built_cache)
    assert not isinstance(model.model, LoadedModel)
    assert [record.message for record in caplog.records] == ["packages run on libtorch"]


def test_a_package_that_cannot_be_opened_when_it_is_called_is_run_eager(
    built_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's module is imported for it, late: nobody's request is lost."""
    import numpy as np
    from support.programs.choices import KINDS, STEPS, tokens

    from snapcap.warmup.runtime.slot_request import SlotRequest

    model = started(built_cache)
    assert not isinstance(model.model, LoadedModel)
    drawn = np.random.default_rng(3)
    images = [drawn.integers(0, 256, (*model.runner.config.vision.image_size, 3), dtype=np.uint8) for _ in range(3)]
    rows = [
        SlotRequest((), params, [0.4] * model.runner.state.cache_length, STEPS) for params in KINDS["everything"]
    ]
    table, crowd = model.plan.table, lambda: None
    expected = tokens(model.runner, table, images, rows, crowd)
    assert caplog.records == []

    late = started(built_cache)
    Broken(monkeypatch).package()
    assert tokens(late.runner, table, images, rows, crowd) == expected
    assert {record.message for record in caplog.records} == {"package stays eager"}
    assert len(caplog.records) == len(("penalties", "sampling", "beams"))
