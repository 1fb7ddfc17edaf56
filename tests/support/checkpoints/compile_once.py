"""Compiles the same C++ once for all tests, and copies what came out from then on, in later runs too.

    python compile_once.py COMPILER FOLDER ARGUMENT...

Many tests build the same packages, and more than half of a build is g++. The folder is that of one compiler, one
machine and one version of torch, so that arguments and the content of files decide what comes out.
Each source begins with torch's headers, and a source that calls kernels (a "wrapper") is mostly the same templates.
Headers and templates are compiled once too, even if a build is too small to precompile a header.

Wrappers are compiled without optimisation; kernels are compiled as always.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_COMMENT = re.compile(rb"^//.*$", re.MULTILINE)  # into which Inductor writes its temporary folder
_PRECOMPILED = ("-D", "TORCH_INDUCTOR_PRECOMPILE_HEADERS")
_NOT_OF_HEADERS = ("-c", "-shared", "-l", "-L")
_HEADERS = re.compile(rb"\s*#include <torch/csrc/inductor/\S+>\n(?:(?:#include <\S+>)?\n)*")
_READS_OTHERS = re.compile(rb'^\s*#\s*include\s*"([^"]*)"|\.incbin', re.MULTILINE)


def key(arguments: Sequence[str]) -> str | None:
    """Returns the key of a call, or None if the call has no output or reads a file that cannot be found.

    Files that a source includes by quotes, as the CPU library's do, are looked for beside the source."""
    if "-o" not in arguments or "-" in arguments:
        return None
    digest = hashlib.sha256()
    arguments = _without_header(arguments)
    output = arguments.index("-o") + 1
    for place, argument in enumerate(arguments):
        path = Path(argument)
        part = argument.encode()
        if place == output:
            # A temporary name may end with the id of a process.
            part = b"" if path.suffix[1:].isdigit() else path.suffix.encode()
        elif path.is_file():
            read = [path.read_bytes()] if path.suffix == ".o" else sources(path)
            if read is None:
                return None
            part = path.suffix.encode() + b"".join(read)
        digest.update(b"%d %s" % (len(part), part))
    return digest.hexdigest()


def sources(path: Path) -> list[bytes] | None:
    """Returns the text of a source and of all that it includes by quotes, or None if any of it cannot be found."""
    texts: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        if (each := waiting.pop()) in texts:
            continue
        if not each.is_file():
            return None
        texts[each] = _COMMENT.sub(b"", each.read_bytes())
        for read in _READS_OTHERS.finditer(texts[each]):
            if read[1] is None:  # .incbin
                return None
            waiting.append(each.parent / os.fsdecode(read[1]))
    return list(texts.values())


def _without_header(arguments: Sequence[str]) -> list[str]:
    """Without what has a precompiled header read, as in a large build: it is the one that the source includes, so
    what comes out is that of a small build."""
    kept: list[str] = []
    for argument in arguments:
        if kept and (kept[-1] == "-include" or (kept[-1], argument) == _PRECOMPILED):
            kept.pop()
        else:
            kept.append(argument)
    return kept


def with_header(compiler: str, folder: Path, arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The arguments of a call, and a folder for all that is compiled with the same headers and options.

    Where the source begins with torch's headers they are taken precompiled: the first call that needs them makes
    that. Elsewhere the arguments stay as they are, without a folder."""
    arguments = list(arguments)
    source = Path(arguments[0])
    # Inductor compiles a package and links it after that, and does both at once for `torch.compile`.
    if source.suffix != ".cpp" or not {"-c", "-shared"} & set(arguments) or not source.is_file():
        return arguments, None
    if not (included := _HEADERS.match(_COMMENT.sub(b"", source.read_bytes()))):
        return arguments, None
    plain = _without_header(arguments)
    output = plain.index("-o")
    flags = [flag for flag in plain[1:output] + plain[output + 2 :] if not flag.startswith(_NOT_OF_HEADERS)]
    name = hashlib.sha256(b"\0".join([*included[0].split(), *map(str.encode, flags)])).hexdigest()
    place = folder / "headers" / name
    place.mkdir(parents=True, exist_ok=True)
    header, made = place / "first.h", place / "first.h.gch"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            header.write_bytes(included[0])
            begun = made.with_suffix(".begun")
            if run([compiler, "-x", "c++-header", str(header), *flags, "-o", str(begun)]):
                return arguments, None
            begun.replace(made)
        os.utime(made)
    return [*plain, "-include", str(header)], place


def run(command: Sequence[str | Path]) -> int:
    """Returns the exit status."""
    return subprocess.run(command, check=False).returncode


def names(path: Path, *options: str) -> set[str]:
    """Returns the names of an object's symbols."""
    listed = subprocess.run(["nm", "-j", *options, path], capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def compile_wrapper(command: Sequence[str], output: Path, templates: Path) -> int:
    """Compile code that calls kernels: the same templates in every package, which take g++ two thirds of its time.

    They are taken from the objects of earlier packages, whose symbols give way to those of others. A source that
    needs more of them is compiled as a whole, and adds its own. Returns the compiler's exit status."""
    if templates.exists():
        if status := run([*command, "-fno-implicit-templates", "-fno-implicit-inline-templates"]):
            return status
        missing = names(output, "--undefined-only") - names(templates)
        if not any(name.startswith("_Z") for name in missing):
            own = output.with_name(f"{output.name}.own")
            output.rename(own)
            status = joined(command[0], [own, templates], output)
            own.unlink()
            return status
    if (status := run(command)) == 0:
        keep_templates(command[0], output, templates)
    return status


def keep_templates(compiler: str, compiled: Path, templates: Path) -> None:
    """Keep an object with all its symbols weak, also those of its kernels, which others lack; but not those of the
    C++ library, for which it is linked."""
    weak = names(compiled, "--defined-only")
    weak |= {name for name in names(compiled, "--undefined-only") if not name.startswith("_")}
    one, whole, symbols = (templates.with_name(f"{os.getpid()}.{suffix}") for suffix in ("one.o", "o", "symbols"))
    symbols.write_text("\n".join(weak))
    subprocess.run(["objcopy", f"--weaken-symbols={symbols}", compiled, one], check=True)
    symbols.unlink()
    if not templates.exists():
        one.replace(templates)
    elif joined(compiler, [templates, one], whole) == 0:
        whole.replace(templates)
    one.unlink(missing_ok=True)


def joined(compiler: str, objects: Sequence[Path], output: Path) -> int:
    return run([compiler, "-r", "-nostdlib", *objects, "-o", output])


def main(compiler: str, folder: Path, arguments: Sequence[str]) -> int:
    """Returns the compiler's exit status."""
    arguments = ["-O0" if argument == "-O1" else argument for argument in arguments]
    name = key(arguments)
    if name is None:
        os.execv(compiler, [compiler, *arguments])
    kept, output = folder / name, Path(arguments[arguments.index("-o") + 1])
    if "c++-header" in arguments:
        output.touch()  # Inductor's own precompiled header, which nothing here reads
        return 0
    if kept.exists():
        os.utime(kept)
        shutil.copy(kept, output)  # with its mode: a library may be run
        return 0
    arguments, place = with_header(compiler, folder, arguments)
    command = [compiler, *arguments]
    if place and output.name.endswith(".wrapper.o"):
        status = compile_wrapper(command, output, place / "templates.o")
    else:
        status = run(command)
    if status == 0:
        whole = folder / f"{name}.{os.getpid()}"
        shutil.copy(output, whole)
        whole.replace(kept)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
