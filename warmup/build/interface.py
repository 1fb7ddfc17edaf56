"""Compiles the exported C functions, which are equal in all packages, once for a build.

Inductor writes two C++ sources for a package: the kernels, and a wrapper that calls them. A wrapper begins with the
interface, which is the same text in every package, and ends with the package's own model. The interface takes the
compiler longer than the model. So the first compiler process that needs the interface compiles it to an object in
the build's temporary folder, and every package joins that object with the object of its model.

If any of these steps fails, Inductor compiles the whole wrapper.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapcap.warmup.build.environment import INTERFACE_FOLDER

_INCLUDE = re.compile(r"^#include.*\n", re.MULTILINE)
# The class template that the interface and a model share. `extern` leaves its code to the interface's object.
_SHARED_CODE = "namespace torch::aot_inductor {{ {}template class AOTInductorModelBase<AOTInductorModel>; }}\n"


def share_interface() -> None:
    """Make Inductor compile wrappers with `compile_apart` in this process, if the environment names a folder."""
    folder = os.environ.get(INTERFACE_FOLDER)
    if not folder:
        return
    from torch._inductor import cpp_builder  # noqa: PLC0415  only a compiler needs torch

    interface = Path(cpp_builder.__file__).parent / "codegen" / "aoti_runtime" / "interface.cpp"
    text = interface.read_text(encoding="utf-8").strip()
    builder_class: Any = cpp_builder.CppBuilder
    build_whole = builder_class.build

    def build(builder: Any) -> None:
        if not compile_apart(shlex.split(builder.get_command_line()), text, Path(folder)):
            build_whole(builder)

    builder_class.build = build


def compile_apart(command: Sequence[str], interface: str, folder: Path) -> bool:
    """Compile a wrapper's interface and model separately, and join both objects.

    Args:
        command: compiler, source, options, ``-c -o`` and the object.
        interface: the source text that all wrappers share.
        folder: keeps compiled interfaces for the other compiler processes of the build.

    Returns:
        False if the command compiles no wrapper with this interface, or if a compilation failed. Then there is no
        object.
    """
    source, output = Path(command[1]), Path(command[-1])
    if not source.name.endswith(".wrapper.cpp") or command[-3:-1] != ["-c", "-o"]:
        return False
    before, found, model = source.read_text(encoding="utf-8").partition(interface)
    if not found:
        return False
    compiler, options = command[0], list(command[2:-1])
    text = f"{before}{interface}\n{_SHARED_CODE.format('')}"
    shared = _compiled_once([compiler, *options], text, folder, output.parent)
    own_source, own = source.with_name(f"own.{source.name}"), output.with_name(f"own.{output.name}")
    headers = "".join(_INCLUDE.findall(interface))
    own_source.write_text(f"{before}{headers}{_SHARED_CODE.format('extern ')}{model}", encoding="utf-8")
    return (
        shared is not None
        and _succeeds([compiler, str(own_source), *options, str(own)], output.parent)
        and _succeeds([compiler, "-r", "-nostdlib", str(own), str(shared), "-o", str(output)], output.parent)
    )


def _compiled_once(command: Sequence[str], text: str, folder: Path, within: Path) -> Path | None:
    """Returns the object of a source, which the first process that needs it compiles; None if that fails.

    ``command``: the compiler and its options up to ``-o``, without source and object."""
    name = hashlib.sha256("\0".join([*command, text]).encode()).hexdigest()[:16]
    source, made = folder / f"interface-{name}.cpp", folder / f"interface-{name}.o"
    failed, part = made.with_suffix(".failed"), made.with_suffix(f".{os.getpid()}.o")
    with made.with_suffix(".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # without locks several processes may compile it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists() and not failed.exists():
            source.write_text(text, encoding="utf-8")
            if _succeeds([command[0], str(source), *command[1:], str(part)], within):
                part.replace(made)
            else:
                failed.touch()
    return made if made.exists() else None


def _succeeds(command: Sequence[str], within: Path) -> bool:
    """Run a compiler in a folder. Its messages are dropped: after a failure the whole wrapper is compiled."""
    done = subprocess.run(command, cwd=within, capture_output=True, check=False)  # noqa: S603  the compiler that compiles packages too
    return done.returncode == 0
