"""Wrappers are compiled as the interface, once for all, and the model of each; where that fails, as a whole."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from snapcap.warmup.build import environment
from snapcap.warmup.build.environment import (
    INTERFACE_FOLDER,
    compile_apart,
    compiler_environment,
    share_interface,
)

INTERFACE = """// the same in every package
#include <torch/csrc/inductor/aoti_runtime/model.h>
#include <vector>
extern "C" int run() { torch::aot_inductor::AOTInductorModel model; return model.doubled(); }"""
CLASSES = """#pragma once
namespace torch::aot_inductor {
template <class M> struct AOTInductorModelBase { int doubled() { return 2 * static_cast<M*>(this)->value(); } };
struct AOTInductorModel : AOTInductorModelBase<AOTInductorModel> { int value(); };
}
"""
MODEL = "namespace torch::aot_inductor {{ int AOTInductorModel::value() {{ return {}; }} }}\n"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="THERE IS NO G++: WRAPPERS ARE NOT COMPILED")


class Wrappers:
    """Compiles wrappers with a g++ that notes what it is called for."""

    def __init__(self, folder: Path, classes: str) -> None:
        self._folder, self._log = folder, folder / "calls"
        self._compiler = folder / "g++"
        self._compiler.write_text(f'#!/bin/sh\necho "$1" >>{self._log}\nexec {shutil.which("g++")} "$@"\n')
        self._compiler.chmod(0o755)
        headers = folder / "torch" / "csrc" / "inductor" / "aoti_runtime"
        headers.mkdir(parents=True)
        (headers / "model.h").write_text(classes)
        (folder / "shared").mkdir()

    def compile(self, name: str, text: str) -> tuple[Path | None, list[str]]:
        """Returns the object, if there is one, and the names of the sources that were compiled for it."""
        source = self._folder / f"{name}.cpp"
        source.write_text(text)
        made = source.with_suffix(".o")
        self._log.write_text("")
        command = [str(self._compiler), str(source), "-O1", "-fPIC", f"-I{self._folder}", "-c", "-o", str(made)]
        compiled = compile_apart(command, INTERFACE, self._folder / "shared")
        assert compiled == made.exists()
        calls = [Path(call).name for call in self._log.read_text().split() if call.endswith(".cpp")]
        return made if compiled else None, calls


def test_the_interface_is_compiled_once_and_joined_with_each_model(tmp_path: Path) -> None:
    wrappers = Wrappers(tmp_path, CLASSES)
    for number, interfaces in ((3, 1), (4, 0)):
        text = f"#include <cstdlib>\n{INTERFACE}\n{MODEL.format(number)}"
        made, calls = wrappers.compile(f"a{number}.wrapper", text)
        assert made is not None
        assert len([call for call in calls if call.startswith("interface-")]) == interfaces
        assert calls[-1] == f"own.a{number}.wrapper.cpp"
        library = made.with_suffix(".so")
        subprocess.run(["g++", "-shared", made, "-o", library], check=True)
        assert ctypes.CDLL(str(library)).run() == 2 * number


def test_without_the_classes_as_they_were_tried_a_wrapper_is_compiled_as_a_whole(tmp_path: Path) -> None:
    """The interface is tried once, and not for each package."""
    wrappers = Wrappers(tmp_path, CLASSES.replace("AOTInductorModelBase", "Base"))
    made = [wrappers.compile(f"a{number}.wrapper", f"{INTERFACE}\n{MODEL.format(number)}") for number in (3, 4)]
    assert [each for each, _ in made] == [None, None]
    assert [len(calls) for _, calls in made] == [1, 0]


@pytest.mark.parametrize(
    ("name", "text"), [("a.kernel", f"{INTERFACE}\n{MODEL.format(3)}"), ("a.wrapper", MODEL.format(3))]
)
def test_other_sources_are_left_to_inductor(name: str, text: str, tmp_path: Path) -> None:
    assert Wrappers(tmp_path, CLASSES).compile(name, text) == (None, [])


def test_inductors_builders_compile_wrappers_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import cpp_wrapper_cpu
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    assert "interface.cpp" in Path(cpp_wrapper_cpu.__file__).read_text(encoding="utf-8")
    monkeypatch.setattr(CppBuilder, "build", CppBuilder.build)  # restored at the end
    asked: list[list[str]] = []
    monkeypatch.setattr(environment, "compile_apart", lambda command, *_: asked.append(command) or True)
    monkeypatch.setenv(INTERFACE_FOLDER, str(tmp_path))
    share_interface()
    options = CppTorchDeviceOptions(device_type="cpu", aot_mode=True, compile_only=True)
    source, made = tmp_path / "a.wrapper.cpp", tmp_path / "a.wrapper.o"
    CppBuilder("a.wrapper", str(source), options, str(tmp_path)).build()
    ((_, first, *_, compiles, outputs, last),) = asked
    assert (first, compiles, outputs, last) == (str(source), "-c", "-o", str(made))


@pytest.mark.parametrize(
    ("device", "packages", "compilers", "apart"),
    [
        *(("cpu", 4, 1, True), ("cpu", 3, 1, False), ("cpu", 18, 9, True), ("cpu", 18, 16, False)),
        *(("cuda", 18, 16, True), ("cuda", 3, 1, False)),
    ],
)
def test_builds_of_many_packages_for_each_compiler_compile_an_interface(
    device: str, packages: int, compilers: int, apart: bool, tmp_path: Path
) -> None:
    folder = compiler_environment(tmp_path, device, packages, {}, compilers)[INTERFACE_FOLDER]
    assert folder == (str(tmp_path) if apart else "")
