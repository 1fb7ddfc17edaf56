"""Build once, start warm: the real commands over one store, and processes that compile nothing."""

import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from support.checkpoints.build_folders import PACKAGES, nearly_built
from support.checkpoints.compilers import WaitingCompiler
from support.fakes.start_modules import assert_starts_without_a_compiler
from support.servers.server_process import ServerProcess, snapcap

BUCKETS = ("--buckets", "1,4")
ROOT = Path(__file__).parents[2]


def states(startup: dict[str, object]) -> set[tuple[str, str]]:
    buckets = startup["buckets"]
    assert isinstance(buckets, list)
    return {(bucket["backend"], bucket["state"]) for bucket in buckets}


def test_a_start_with_artifacts_is_compiled_and_warm_in_every_bucket(
    built_cache: Path, samples: dict[Path, str]
) -> None:
    options = ("--cache-dir", str(built_cache), "--strict", "--backend", "aot")
    with ServerProcess(*options, *BUCKETS) as server:
        startup = server.wait_ready().startup()
        assert (startup["tier"], startup["artifacts"]["result"]) == ("aot", "hit")
        assert states(startup) == {("aot", "warm")}
        for path, caption in samples.items():
            reply = server.caption(path)
            assert (reply["caption"], reply["backend"]) == (caption, "aot")
            assert server.caption(path, "?num_beams=3&no_repeat_ngram_size=3")["caption"] == caption
        threads = [threading.Thread(target=server.caption, args=(path,)) for path in samples]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = server.metrics()
    for size in (1, 4):
        assert metrics[f'snapcap_step_duration_seconds_count{{bucket="{size}",component="decoder"}}'] > 0
    assert metrics['snapcap_compile_events_total{when="startup"}'] == 0
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0
    assert metrics['snapcap_artifact_requests_total{kind="aot",result="hit"}'] == 1


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_leaves_nothing_in_the_temporary_folder(
    end: signal.Signals, built_cache: Path, tmp_path: Path, samples: dict[Path, str]
) -> None:
    """However it ends: packages are opened without one."""
    options = ("--cache-dir", str(built_cache), "--strict", "--backend", "aot", "--drain-delay", "0")
    path, caption = next(iter(samples.items()))
    with ServerProcess(*options, *BUCKETS, TMPDIR=str(tmp_path)) as server:
        assert server.wait_ready().startup()["tier"] == "aot"
        assert server.caption(path)["caption"] == caption
        server.process.send_signal(end)
        server.process.wait(60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_a_start_removes_no_folder_that_is_named_like_a_loaders(
    backend: str, built_cache: Path, demo_folder: Path, tmp_path: Path
) -> None:
    """torch's own loader leaves folders of that name behind, in the temporary folder and nowhere else."""
    model, beside = tmp_path / "aotinductor_models" / "demo", tmp_path / "aotinductor_models" / "thesis.txt"
    shutil.copytree(demo_folder, model, ignore=shutil.ignore_patterns("*.py", "samples", "__pycache__"))
    beside.write_text("three years of work")
    before = sorted(tmp_path.rglob("*"))
    options = ("--model", str(model), "--cache-dir", str(built_cache), "--backend", backend, *BUCKETS)
    with ServerProcess(*options, "--drain-delay", "0") as server:
        assert server.wait_ready().startup()["tier"] == backend
        server.terminate()
        assert server.process.wait(60) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_compiled_start_imports_no_compiler_and_starts_no_process(built_cache: Path) -> None:
    assert_starts_without_a_compiler(built_cache, "cpu")


def test_another_checkpoint_of_the_same_shapes_starts_from_the_same_artifacts(
    built_cache: Path, demo_folder: Path, tmp_path: Path, samples: dict[Path, str]
) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "tuned"
    shutil.copytree(demo_folder, other, ignore=shutil.ignore_patterns("*.py", "samples", "__pycache__"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.0001 for name, tensor in tensors.items()}, other / "model.safetensors")
    options = ("--model", str(other), "--cache-dir", str(built_cache), "--backend", "aot", "--strict")
    with ServerProcess(*options, *BUCKETS) as server:
        assert server.wait_ready().startup()["tier"] == "aot"
        path, caption = next(iter(samples.items()))
        assert server.caption(path)["caption"] == caption


def test_a_second_build_does_nothing_and_explain_says_why(built_cache: Path) -> None:
    again = snapcap("build", "--cache-dir", str(built_cache), *BUCKETS, CXX="no-such-compiler")
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stderr
    hit = snapcap("explain", "--cache-dir", str(built_cache), *BUCKETS)
    assert (hit.returncode, "result hit" in hit.stdout) == (0, True)
    assert [line.split()[0] for line in hit.stdout.splitlines()] == ["model", "key", "result"]
    miss = snapcap("explain", "--cache-dir", str(built_cache), "--buckets", "1,2")
    assert miss.returncode == 1
    assert "model.buckets is [1, 2] here and [1, 4] there" in miss.stdout
    factors = miss.stdout.partition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in factors] == ["factor", "model.buckets"]
    every = snapcap("explain", "--all", "--cache-dir", str(built_cache), "--buckets", "1,2")
    assert {"model.dtype", "torch.version", "model.buckets"} <= {
        line.split()[0] for line in every.stdout.splitlines() if line
    }


def test_an_interrupted_build_keeps_what_is_done(built_cache: Path, tmp_path: Path) -> None:
    """A build folder that lacks one package: only that one needs the compiler, which is not there."""
    (builds,) = (built_cache / "store" / "builds").iterdir()
    target = tmp_path / "store" / "builds" / builds.name
    shutil.copytree(builds, target)
    (tmp_path / "store").chmod(0o700)
    whole = snapcap("build", "--cache-dir", str(tmp_path), *BUCKETS, CXX="no-such-compiler")
    assert whole.returncode == 0, whole.stderr
    assert f"{PACKAGES} packages" in whole.stderr
    shutil.rmtree(tmp_path / "store" / "manifests")
    (target / "aot" / "decoder_before.b4.pt2").write_bytes(b"half written")
    damaged = snapcap("build", "--cache-dir", str(tmp_path), *BUCKETS, CXX="no-such-compiler")
    assert damaged.returncode == 1
    assert "no C++ compiler (no-such-compiler)" in damaged.stderr


def test_a_wrong_package_and_one_that_crashes_fail_the_self_check(built_cache: Path, tmp_path: Path) -> None:
    from snapcap.warmup.build.builder import Builder
    from snapcap.warmup.machine.worker import Worker, WorkerError
    from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
    from snapcap.warmup.plan.checkpoint import read_checkpoint
    from snapcap.warmup.plan.plan import PlannedJob, make_plan

    (builds,) = (built_cache / "store" / "builds").iterdir()
    packages = tmp_path / "packages"
    shutil.copytree(builds, packages)
    shutil.copy(packages / "aot" / "decoder_before.b4.pt2", packages / "aot" / "decoder_before.b1.pt2")
    damaged = packages / "aot" / "encoder_before.b1.pt2"
    damaged.write_bytes(damaged.read_bytes()[:-5000])
    options = StartOptions(ModelOptions(cache_dir=tmp_path), ComputeOptions(buckets=(1, 4)))
    checkpoint = read_checkpoint(options)
    plan = make_plan(checkpoint.config, options)
    assert not [task for task in Builder(checkpoint, plan, packages).tasks if task.size not in (1, 4)]
    job, checked = PlannedJob(checkpoint.folder, plan, packages), {"AOTI_RUNTIME_CHECK_INPUTS": "1"}
    with Worker("snapcap.warmup.build.check_worker", job, checked) as worker:
        assert worker.ask({"region": "decoder_block", "size": 1}, 120)["difference"] < 1e-4
        for region in ("decoder_before", "encoder_before"):
            with pytest.raises(WorkerError):
                worker.ask({"region": region, "size": 1}, 120)


def test_a_compiler_of_many_packages_compiles_what_they_have_in_common_once(tmp_path: Path) -> None:
    from snapcap.warmup.build.environment import compiler_environment
    from snapcap.warmup.machine.worker import Worker
    from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
    from snapcap.warmup.plan.checkpoint import read_checkpoint
    from snapcap.warmup.plan.plan import PlannedJob, make_plan

    options = StartOptions(ModelOptions(cache_dir=tmp_path), ComputeOptions(buckets=(1, 4)))
    checkpoint = read_checkpoint(options)
    job = PlannedJob(checkpoint.folder, make_plan(checkpoint.config, options), tmp_path / "packages")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    task = {"region": "decoder_before", "size": 4}
    environment = compiler_environment(scratch, "cpu", PACKAGES, {})
    with Worker("snapcap.warmup.build.compile_worker", job, environment) as compiler:
        compiler.ask(task, 200)
    assert len([*scratch.glob("interface-*.o")]) == 1
    with Worker("snapcap.warmup.build.check_worker", job, {"AOTI_RUNTIME_CHECK_INPUTS": "1"}) as checker:
        assert checker.ask(task, 120)["difference"] < 1e-4


def test_without_a_compiler_the_server_stays_eager_and_says_so(tmp_path: Path, samples: dict[Path, str]) -> None:
    with ServerProcess("--cache-dir", str(tmp_path), *BUCKETS, CXX="no-such-compiler") as server:
        server.wait_ready()
        server.wait_for(lambda: (server.startup()["build"] or {}).get("state") == "failed")
        build = server.startup()["build"]
        path, caption = next(iter(samples.items()))
        assert server.caption(path)["caption"] == caption
    assert "no C++ compiler (no-such-compiler)" in build["error"]


@pytest.mark.timeout(900)  # compilers of the lowest priority, beside a server that is kept busy
def test_a_build_behind_a_serving_server_is_swapped_in_under_load(
    built_cache: Path, tmp_path: Path, samples: dict[Path, str]
) -> None:
    """No request fails, every caption is right before, during and after, and the next start is compiled. A bucket
    of each component can be swapped at once, and one when its package is built."""
    wrong: list[object] = []
    served: set[str] = set()
    stop = threading.Event()

    def client(paths: list[Path]) -> None:
        while not stop.is_set():
            for path in paths:
                began = time.monotonic()
                status, body, _ = server.call("/v1/caption", path.read_bytes())
                if status != 200 or body["caption"] != samples[path]:
                    wrong.append(body)
                else:
                    served.add(body["backend"])
                stop.wait(0.2 + 4 * (time.monotonic() - began))  # the compilers must get most of the two CPUs

    nearly_built(built_cache, tmp_path / "store", ("aot/encoder_after.b1", "aot/decoder_block.b4"))
    compiler = WaitingCompiler.make(tmp_path / "compiler")
    options = ("--cache-dir", str(tmp_path), *BUCKETS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with ServerProcess(*options, TMPDIR=str(temporary), CXX=str(compiler.path)) as server:
        server.wait_ready()
        assert server.startup()["tier"] == "eager"
        clients = [threading.Thread(target=client, args=(list(samples)[i::2],)) for i in range(2)]
        for thread in clients:
            thread.start()
        try:
            server.wait_for(lambda: "eager" in served)
            compiler.let_go()
            ends = ("published", "failed")
            server.wait_for(lambda: (server.startup()["build"] or {}).get("state") in ends, seconds=600)
            server.wait_for(lambda: "aot" in served)
        finally:
            stop.set()
            for thread in clients:
                thread.join()
        metrics, startup = server.metrics(), server.startup()
    assert wrong == []
    assert startup["build"]["state"] == "published", startup["build"]
    assert served == {"eager", "aot"}
    assert states(startup) == {("aot", "warm")}
    assert startup["tier"] == "eager"
    assert metrics['snapcap_bucket_swaps_total{result="swapped"}'] == 4
    assert metrics['snapcap_artifact_publish_total{result="published"}'] == 1
    assert metrics['snapcap_compile_events_total{when="serving"}'] == 0
    assert list(temporary.glob("aotinductor_*")) == [], "nor of those who checked"
    with ServerProcess(*options) as server:
        assert server.wait_ready().startup()["tier"] == "aot"
