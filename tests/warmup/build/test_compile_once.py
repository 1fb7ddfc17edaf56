"""The compiler that the tests share: what was compiled is copied, whatever else is asked for is compiled."""

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


def test_an_input_that_reads_files_of_its_own_is_compiled_each_time(compiler: Compiler, tmp_path: Path) -> None:
    for name, text in (("a.cpp", '#include "b.h"\n'), ("a.S", ' .incbin "b.bin"\n')):
        source = written(tmp_path / name, text)
        assert [compiler.run(source, "-o", tmp_path / "a.o") for _ in range(2)] == [(0, 1)] * 2


def test_questions_and_failures_are_not_kept(compiler: Compiler, tmp_path: Path) -> None:
    for arguments in ((written(tmp_path / "a.cpp", ""),), ("/dev/null", "-o", "/dev/null", "-")):
        assert [compiler.run(*arguments)[1] for _ in range(2)] == [1, 1]
    assert [compiler.run(tmp_path / "none.cpp", "-o", tmp_path / "a.o") for _ in range(2)] == [(3, 1)] * 2
    assert not any((tmp_path / "kept").iterdir())
