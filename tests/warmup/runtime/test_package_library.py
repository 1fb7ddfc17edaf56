"""The library of a package is loaded from memory: nothing is written for it, so there is nothing to remove."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from support.servers.server_process import python

from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.machine.denied import library_file
from snapcap.warmup.runtime.aoti.packages import CPU_LIBRARY_SONAME, PackageError, package_content
from snapcap.warmup.runtime.aoti.torch_packages import open_package

INSIDE = Path("package") / "data" / "aotinductor" / "model"
CPU = torch.device("cpu")


def packed(package: Path, **members: bytes) -> Path:
    """A package of these files, whose suffix is in their names after ``__``."""
    with zipfile.ZipFile(package, "w") as archive:
        for name, content in members.items():
            archive.writestr(str(INSIDE / name.replace("__", ".")), content)
    return package


@pytest.fixture
def no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes to it fails."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))


def test_a_package_is_opened_and_run_without_a_temporary_folder(
    built_cache: Path, no_temporary_folder: None
) -> None:
    (build,) = (built_cache / "store" / "builds").iterdir()
    run = open_package(VerifiedFile.of(build / "aot" / "decoder_after.b1.pt2"), CPU)
    assert run is not None
    mapped = Path("/proc/self/maps").read_text()
    assert "/memfd:snapcap-library" in mapped
    assert "aotinductor_" not in mapped


def test_of_a_package_only_the_names_of_torchs_libraries_and_openmp_are_replaced(
    built_cache: Path, tmp_path: Path
) -> None:
    """They are looked for in all of the library: each must be there once, and among those that it links."""

    def linked(content: bytes) -> list[str]:
        library = tmp_path / "library.so"
        library.write_bytes(content)
        printed = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
        return re.findall(r"\(NEEDED\).*\[(.+)\]", printed)

    (build,) = (built_cache / "store" / "builds").iterdir()
    for package in (build / "aot").glob("*.pt2"):
        theirs, ours = package_content(package), package_content(package, standalone=True)
        torchs = [name for name in linked(theirs) if name.startswith(("libtorch", "libc10", "libgomp"))]
        assert torchs
        assert [theirs.count(f"\0{name}\0".encode()) for name in torchs] == [1] * len(torchs)
        others = [name for name in linked(theirs) if name not in torchs]
        assert sorted(linked(ours)) == sorted([CPU_LIBRARY_SONAME] * len(torchs) + others)
        assert b"\0GOMP_" not in ours
        assert b"\0omp_" not in ours
        names = [*torchs, *re.findall(r"\0((?:GOMP|omp)_\w+)", theirs.decode("latin-1"))]
        assert sum(one != other for one, other in zip(theirs, ours, strict=True)) <= sum(map(len, names))


def test_two_libraries_are_never_taken_for_each_other(tmp_path: Path) -> None:
    """The dynamic linker knows a library by its name, which is that of a descriptor."""
    code = "import ctypes, sys; from pathlib import Path\n"
    code += "from snapcap.warmup.machine.denied import library_file\n"
    code += "from snapcap.warmup.runtime.aoti.packages import package_content\n"
    code += "for path in map(Path, sys.argv[1:]):\n"
    code += "    with library_file(package_content(path)) as name: print(ctypes.CDLL(name).answer())\n"
    packages = []
    for answer in (1, 2):
        library = tmp_path / f"{answer}.so"
        source = f"int answer(void) {{ return {answer}; }}"
        subprocess.run(
            ["g++", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True
        )
        packages.append(str(packed(tmp_path / f"{answer}.pt2", a__so=library.read_bytes())))
    run = python("-c", code, *packages, *packages)
    assert run.stdout.split() == ["1", "2", "1", "2"], run.stderr


def test_where_there_is_no_file_in_memory_a_temporary_one_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "memfd_create", forbidden)
    package = packed(tmp_path / "a.pt2", a__so=b"library")
    with library_file(package_content(package)) as name:
        assert Path(name).read_bytes() == b"library"
    assert list(tmp_path.iterdir()) == [package]


def test_a_package_that_cannot_be_opened_is_named_and_leaves_nothing(
    tmp_path: Path, no_temporary_folder: None
) -> None:
    package = packed(tmp_path / "broken.pt2", a__so=b"not a library", a__json=b"", a_metadata__json=b"{}")
    with pytest.raises(PackageError, match=r"broken\.pt2 cannot be opened: it calls operators"):
        open_package(VerifiedFile.of(package), CPU)
    with pytest.raises(PackageError, match=r"broken\.pt2 cannot be opened: .*file too short"):
        open_package(VerifiedFile.of(packed(package, a__so=b"not a library")), CPU)
    with pytest.raises(PackageError, match=r"broken\.pt2 cannot be opened: it holds 2 libraries, not one"):
        open_package(VerifiedFile.of(packed(package, a__so=b"", b__so=b"")), CPU)
    package.write_bytes(b"no archive")
    with pytest.raises(PackageError, match=r"broken\.pt2 cannot be opened: File is not a zip file"):
        open_package(VerifiedFile.of(package), CPU)
    assert list(tmp_path.iterdir()) == [package]


def test_a_package_is_made_to_link_the_cpu_library_in_the_place_of_torchs(tmp_path: Path) -> None:
    """And is the same otherwise: every other name in it has the place that it had."""
    library = b"\0libtorch.so\0libtorch_cpu.so\0libc10.so\0libm.so.6\0mylibtorch.so\0libtorch.so.1\0"
    package = packed(tmp_path / "a.pt2", a__so=library)
    assert package_content(package) == library
    standalone = package_content(package, standalone=True)
    assert len(standalone) == len(library)
    ours = CPU_LIBRARY_SONAME.encode()
    assert [name for name in standalone.split(b"\0") if name] == [
        *(ours, ours, ours),
        *(b"libm.so.6", b"mylibtorch.so", b"libtorch.so.1"),
    ]
    assert standalone.index(b"libm") == library.index(b"libm")
