"""`snapcap build` that is killed goes on where it was, and a package that crashes takes only its checker along."""

import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from support.build_folders import nearly_built
from support.server_process import clean_environment, snapcap

from warmup.child import Child, ChildError
from warmup.options import StartOptions, StoreOptions
from warmup.plan import make_plan
from warmup.prepare import read_checkpoint
from warmup.region_task import job_of

MISSING = ("aot/encoder_before.b1", "aot/decoder_after.b4")
_ABORTS = "#include <cstdlib>\n__attribute__((constructor)) static void loaded() { abort(); }\n"


def test_a_build_that_was_killed_keeps_what_is_done(built_cache: Path, tmp_path: Path) -> None:
    build = nearly_built(built_cache, tmp_path / "store", MISSING)
    options = ("--cache-dir", str(tmp_path), "--buckets", "1,4", "--build-workers", "1")
    first, second = (build / f"{name}.json" for name in MISSING)
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "build", *options],
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while not first.exists():
            assert process.poll() is None, "ended before anything was built"
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert not second.exists()
    assert not (tmp_path / "store" / "manifests").exists()

    again = snapcap("build", *options)
    assert again.returncode == 0, again.stderr
    events = [line.split()[0] for line in again.stderr.splitlines() if " × " in line]
    assert (events.count("kept"), events.count("built")) == (13, 1)
    assert "published: " in again.stderr
    assert snapcap("explain", *options[:4]).returncode == 0


def test_a_package_that_crashes_its_process_is_told_by_its_signal(built_cache: Path, tmp_path: Path) -> None:
    (build,) = (built_cache / "store" / "builds").iterdir()
    packages = tmp_path / "packages"
    shutil.copytree(build, packages)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", tmp_path / "abort.so"],
        input=_ABORTS,
        text=True,
        check=True,
    )
    whole, crashing = build / "aot" / "decoder_block.b1.pt2", packages / "aot" / "decoder_block.b1.pt2"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(crashing, "w") as target:
        libraries = [name for name in source.namelist() if name.endswith(".so")]
        assert len(libraries) == 1
        for member in source.infolist():
            data = (tmp_path / "abort.so").read_bytes() if member.filename in libraries else source.read(member)
            target.writestr(member, data)
    options = StartOptions("demo", tmp_path, StoreOptions(tmp_path), buckets=(1, 4))
    checkpoint = read_checkpoint(options)
    job = job_of(checkpoint.folder, make_plan(checkpoint.config, options), packages)
    checker = Child("warmup.check_worker", job, {"AOTI_RUNTIME_CHECK_INPUTS": "1"})
    checker.start()
    try:
        assert checker.ask({"region": "decoder_before", "size": 1})["difference"] < 1e-4
        with pytest.raises(ChildError, match="ended with signal 6"):
            checker.ask({"region": "decoder_block", "size": 1})
        assert not checker.alive
    finally:
        checker.kill()
