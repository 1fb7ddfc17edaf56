"""The compiler that the tests share: what was compiled is copied, whatever else is asked for is compiled."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import compile_once


class Compiler:
    """One whose output is what it read, and which writes down that it was called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = folder / "g++"
        self._program.write_text(
            f"#!/bin/sh\necho called >>{folder}/calls\n"
            'cat "$1" || exit 3\n[ "$2" != -o ] || { cp "$1" "$3" && chmod 755 "$3"; }\n'
        )
        self._program.chmod(0o755)
        (folder / "kept").mkdir()

    def run(self, *arguments: object) -> tuple[int, int]:
        """Returns its exit status, and how often the compiler was called."""
        (self._folder / "calls").write_text("")
        command = [sys.executable, "-I", "-S", compile_once.__file__, self._program, self._folder / "kept"]
        run = subprocess.run([*command, *arguments], stdout=subprocess.DEVNULL, check=False)
        return run.returncode, (self._folder / "calls").read_text().count("called")


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_the_same_input_elsewhere_is_copied_with_its_mode(compiler: Compiler, tmp_path: Path) -> None:
    one = written(tmp_path / "one" / "abc.cpp", "// embedded in /tmp/one\nint one;\n")
    other = written(tmp_path / "other" / "xyz.cpp", "// embedded in /tmp/other\nint one;\n")
    assert compiler.run(one, "-o", tmp_path / "one" / "abc.so") == (0, 1)
    assert compiler.run(other, "-o", tmp_path / "other" / "xyz.so") == (0, 0)
    copy = tmp_path / "other" / "xyz.so"
    assert copy.read_text() == one.read_text()
    assert copy.stat().st_mode & 0o111


def test_another_input_option_or_kind_is_compiled(compiler: Compiler, tmp_path: Path) -> None:
    source, output = written(tmp_path / "a.cpp", "int one;\n"), tmp_path / "a.o"
    assert compiler.run(source, "-o", output) == (0, 1)
    assert compiler.run(source, "-o", output, "-O3") == (0, 1)
    assert compiler.run(source, "-o", tmp_path / "a.so") == (0, 1)
    assert compiler.run(written(source, "int two;\n"), "-o", output) == (0, 1)
    assert output.read_text() == "int two;\n"


def test_a_precompiled_header_makes_no_difference(compiler: Compiler, tmp_path: Path) -> None:
    source, output = written(tmp_path / "a.cpp", "#include <b.h>\n"), tmp_path / "a.o"
    header = written(tmp_path / "b.h", "")
    assert compiler.run(source, "-o", output, "-D", "X") == (0, 1)
    used = ("-D", "TORCH_INDUCTOR_PRECOMPILE_HEADERS", "-include", header)
    assert compiler.run(source, "-o", output, *used, "-D", "X") == (0, 0)
    assert compiler.run(source, "-o", output, *used, "-D", "Y") == (0, 1)


def test_files_that_a_source_includes_are_part_of_it(compiler: Compiler, tmp_path: Path) -> None:
    source = written(tmp_path / "a.cpp", '#include "b.h"\n')
    written(tmp_path / "b.h", '#pragma once\n#include "c.h"\n')
    header = written(tmp_path / "c.h", '#pragma once\n#include "b.h"\nint one;\n')
    assert [compiler.run(source, "-o", tmp_path / f".a.so.{process}") for process in (12, 345)] == [(0, 1), (0, 0)]
    written(header, "int two;\n")
    assert compiler.run(source, "-o", tmp_path / ".a.so.6") == (0, 1)


def test_an_input_that_reads_what_is_not_found_is_compiled_each_time(compiler: Compiler, tmp_path: Path) -> None:
    for name, text in (("a.cpp", '#include "b.h"\n'), ("a.S", ' .incbin "b.bin"\n')):
        source = written(tmp_path / name, text)
        assert [compiler.run(source, "-o", tmp_path / "a.o") for _ in range(2)] == [(0, 1)] * 2


def test_questions_and_failures_are_not_kept(compiler: Compiler, tmp_path: Path) -> None:
    for arguments in ((written(tmp_path / "a.cpp", ""),), ("/dev/null", "-o", "/dev/null", "-")):
        assert [compiler.run(*arguments)[1] for _ in range(2)] == [1, 1]
    assert [compiler.run(tmp_path / "none.cpp", "-o", tmp_path / "a.o") for _ in range(2)] == [(3, 1)] * 2
    assert not any((tmp_path / "kept").iterdir())


TEMPLATES = """
#pragma once
#include <vector>
template <class T> T twice(T x) { std::vector<T> all{x, x}; return all[0] + all[1]; }
"""


class Packages:
    """Builds libraries as Inductor does, with the real compiler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "calls"
        compiler = folder / "g++"
        compiler.write_text(f'#!/bin/sh\necho "$@" >>{self._log}\nexec {shutil.which("g++")} "$@"\n')
        compiler.chmod(0o755)
        (folder / "kept").mkdir()
        (folder / "torch" / "csrc" / "inductor").mkdir(parents=True)
        written(folder / "torch" / "csrc" / "inductor" / "first.h", TEMPLATES)
        self._once = [sys.executable, "-I", "-S", compile_once.__file__, compiler, folder / "kept"]

    def build(self, name: str, body: str) -> tuple[ctypes.CDLL, list[str]]:
        """Returns the library, and the calls of the compiler that its object took."""
        source = written(self._folder / f"{name}.wrapper.cpp", f"#include <torch/csrc/inductor/first.h>\n{body}\n")
        compiled, library = source.with_suffix(".o"), source.with_suffix(".so")
        self._log.write_text("")
        options = ("-O0", "-fPIC", f"-I{self._folder}")
        subprocess.run([*self._once, source, *options, "-c", "-o", compiled], check=True)
        calls = self._log.read_text().splitlines()
        subprocess.run([*self._once, compiled, "-shared", "-fPIC", "-o", library, "-Wl,-z,now"], check=True)
        return ctypes.CDLL(str(library)), calls

    def build_at_once(self, name: str, value: int) -> tuple[ctypes.CDLL, list[str]]:
        """As `torch.compile` does."""
        body = f'extern "C" int value() {{ return twice({value}); }}'
        source = written(self._folder / f"{name}.main.cpp", f"#include <torch/csrc/inductor/first.h>\n{body}\n")
        library = source.with_suffix(".so")
        self._log.write_text("")
        options = ("-O2", "-fPIC", f"-I{self._folder}", "-shared", "-o", library, "-lm")
        subprocess.run([*self._once, source, *options], check=True)
        return ctypes.CDLL(str(library)), self._log.read_text().splitlines()


@pytest.mark.skipif(shutil.which("g++") is None, reason="THERE IS NO G++: THE SHARED COMPILER IS NOT CHECKED")
def test_header_and_templates_of_wrappers_are_compiled_once(tmp_path: Path) -> None:
    packages = Packages(tmp_path)
    kernel = 'int kernel_of_{0}() {{ return {1}; }}\nextern "C" int value() {{ return twice({1}); }}'
    first, calls = packages.build("first", kernel.format("first", 3))
    assert ["c++-header" in call for call in calls] == [True, False]
    second, calls = packages.build("second", kernel.format("second", 4))
    assert ["-fno-implicit-templates" in call for call in calls] == [True, False], "and one to join both"
    assert (first.value(), second.value()) == (6, 8)

    other, calls = packages.build("other", 'extern "C" int value() { return twice(2.5f) + twice(1); }')
    assert ["-fno-implicit-templates" in call for call in calls] == [True, False, False], "whole, and one to add it"
    assert other.value() == 7
    again, calls = packages.build("again", 'extern "C" int value() { return twice(3.5f) + twice(2); }')
    assert ["-fno-implicit-templates" in call for call in calls] == [True, False]
    assert (again.value(), second.value()) == (11, 8)
    assert not [*tmp_path.glob("*.own")]

    at_once = [packages.build_at_once(f"kernel{number}", number) for number in range(2)]
    assert [library.value() for library, _ in at_once] == [0, 2]
    assert ["c++-header" in call for _, calls in at_once for call in calls] == [True, False, False]
