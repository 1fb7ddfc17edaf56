"""The `snapcap` command. Exit status 2: the command line or the environment is wrong."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from snapcap.service.config.reader import (
    BUILD_GROUPS,
    SettingsError,
    add_arguments,
    read_settings,
    suggestion,
)
from snapcap.service.config.settings import GROUPS
from snapcap.service.errors import ServiceError
from snapcap.service.offline.arguments import add_job_arguments, read_job
from snapcap.warmup.machine.own_imports import import_only_what_is_installed
from snapcap.warmup.option import options_of

_VERSION = "--version"
_BENCH = "bench"
_ENVIRONMENT = "Each option can also be set by the variable in its brackets; an argument wins."
_TOP = """\
examples:
  snapcap serve                                  the demo model on port 8000
  snapcap serve --model ./my-vit-gpt2 --port 80  a folder of VisionEncoderDecoderModel
  snapcap caption photo.jpg                      without a server
  snapcap build --store s3://bucket/snapcap      compile once, start warm everywhere
  snapcap import org/old-captioner ./captioner   convert older files, then serve the folder

`snapcap COMMAND --help` lists the options of a command.
"""
_SERVE = f"""\
examples:
  snapcap serve
  snapcap serve --model s3://bucket/captioner --device cuda:0 --log-format json
  SNAPCAP_PORT=9000 snapcap serve
  curl --data-binary @photo.jpg localhost:8000/v1/caption

{_ENVIRONMENT}
"""
_BUILD = f"""\
examples:
  snapcap build                                             into the folder that `snapcap serve` looks in
  snapcap build --store s3://bucket/snapcap --sign-key KEY  once for a fleet of equal machines
  snapcap build --backend jit                               cache artifacts for `snapcap serve --backend jit`

A second build of the same key does nothing, and an interrupted one goes on where it was. Exit
status 0: the store has the artifacts; 1: it has not; 130: interrupted (143 by SIGTERM).
{_ENVIRONMENT}
"""
_EXPLAIN = f"""\
examples:
  snapcap explain
  snapcap explain --store s3://bucket/snapcap --trusted-key KEY.pub

Exit status 0: there are artifacts; 1: there are none, and the factor that differs from the nearest is marked.
{_ENVIRONMENT}
"""
_KEYGEN = """\
examples:
  snapcap keygen artifacts.key
  snapcap build --store s3://bucket/snapcap --sign-key artifacts.key
  snapcap serve --store s3://bucket/snapcap --trusted-key artifacts.key.pub
"""
_CAPTION = f"""\
examples:
  snapcap caption photo.jpg
  snapcap caption --prompt "a red" *.png
  snapcap caption photos --recursive --output captions.jsonl
  snapcap caption photos --sidecar --resume      photo.txt beside each photo.jpg that has none
  find . -name '*.jpg' -newer last | snapcap caption -

No file is replaced without --overwrite. An image that cannot be read does not stop the others and
is listed at the end. Exit status 0: every image has its caption; 1: some have none; 2: the command
line is wrong, or captions are in the way; 130: interrupted (143 by SIGTERM), and --resume goes on.
{_ENVIRONMENT}
"""
_IMPORT = f"""\
examples:
  snapcap import nlpconnect/vit-gpt2-image-captioning ./captioner
  snapcap serve --model ./captioner

{_ENVIRONMENT}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Without ``argv`` it is this process's."""
    if argv is None:
        import_only_what_is_installed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("snapcap: interrupted", file=sys.stderr)
        return 130
    except (SettingsError, ServiceError) as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Reports an error as one line, through SettingsError."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {self.prog} --help")


def _run(arguments: list[str]) -> int:
    parser = _parser()
    commands = {
        "serve": _serve,
        "build": _build,
        "explain": _explain,
        "keygen": _keygen,
        "caption": _caption,
        "import": _import,
    }
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if arguments[0] == _VERSION:
        # Here, because it costs a command that starts fast 10 ms.
        from snapcap.warmup.version import snapcap_version  # noqa: PLC0415

        print(f"snapcap {snapcap_version()}")
        return 0
    if arguments[0] == _BENCH:  # its options are its own
        from snapcap.service.cli.bench import bench  # noqa: PLC0415

        return bench(arguments[1:])
    if not arguments[0].startswith("-") and arguments[0] not in commands:
        raise SettingsError(
            f"unknown command {arguments[0]!r}{suggestion(arguments[0], [*commands, _BENCH])}; see snapcap --help"
        )
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise _unknown(unknown[0].partition("=")[0], "" if known.command is None else f"{known.command} ")
    return commands[known.command](known)


def _unknown(word: str, command: str) -> SettingsError:
    flags = [option.flag for group in GROUPS.values() for option in options_of(group).values()]
    what = "option" if word.startswith("-") else "argument"
    return SettingsError(f"unknown {what} {word}{suggestion(word, flags)}; see snapcap {command}--help")


def _serve(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, os.environ)
    # Here, so that a bad option is reported, and help printed, without importing a server.
    from snapcap.service.server.serve import leave, serve  # noqa: PLC0415

    leave(serve(settings))


def _build(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, os.environ)
    from snapcap.service.cli.interrupt import Interrupted, interruptible  # noqa: PLC0415
    from snapcap.service.server.serve import leave  # noqa: PLC0415

    try:
        with interruptible():
            from snapcap.service.cli.build import build  # noqa: PLC0415

            status = build(settings)
    except Interrupted as interrupted:
        print(f"snapcap: {interrupted}", file=sys.stderr)
        status = interrupted.status
    leave(status)


def _explain(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, os.environ)
    from snapcap.service.cli.explain import explain  # noqa: PLC0415

    return explain(settings)


def _keygen(arguments: argparse.Namespace) -> int:
    from snapcap.service.cli.keygen import keygen  # noqa: PLC0415

    return keygen(Path(arguments.key))


def _caption(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, os.environ)
    job = read_job(arguments)
    from snapcap.service.offline.command import caption  # noqa: PLC0415
    from snapcap.service.server.serve import leave  # noqa: PLC0415

    try:
        status = caption(settings, job)
    except KeyboardInterrupt:
        print("snapcap: interrupted", file=sys.stderr)
        status = 130
    leave(status)


def _import(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, os.environ)
    from snapcap.models.config import ConfigError  # noqa: PLC0415
    from snapcap.warmup.checkpoints.importer import import_checkpoint  # noqa: PLC0415
    from snapcap.warmup.checkpoints.patterns import CheckpointError  # noqa: PLC0415

    try:
        written = import_checkpoint(arguments.source, Path(arguments.destination), settings.s3, arguments.force)
    except (CheckpointError, ConfigError) as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


def _parser() -> _Parser:
    parser = _make(
        None,
        "snapcap",
        "Image captioning over HTTP: ViT encoder, GPT-2 decoder, started as fast as it can be.",
        _TOP,
    )
    parser.add_argument(_VERSION, action="store_true", help="print the version and exit")
    adder = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    serve = _make(adder, "serve", "Serve a model over HTTP.", _SERVE)
    add_arguments(serve, GROUPS)

    build = _make(adder, "build", "Compile a model's artifacts here and publish them to a store.", _BUILD)
    add_arguments(build, BUILD_GROUPS)
    explain = _make(
        adder, "explain", "Show what artifacts a start here needs, and whether there are any.", _EXPLAIN
    )
    add_arguments(explain, BUILD_GROUPS)
    keygen = _make(adder, "keygen", "Make a key pair for signing artifacts: KEY and KEY.pub.", _KEYGEN)
    keygen.add_argument("key", metavar="KEY", help="file of the private key; must not exist")

    caption = _make(adder, "caption", "Caption images and folders of them without a server.", _CAPTION)
    add_job_arguments(caption)
    add_arguments(caption, ("model", "compute", "images", "store", "s3", "log"))

    importer = _make(
        adder,
        "import",
        "Convert a checkpoint to a folder that starts fast: safetensors and tokenizer.json.",
        _IMPORT,
    )
    importer.add_argument("source", metavar="SRC", help="a folder, a hub id, or s3://bucket/prefix")
    importer.add_argument("destination", metavar="DST", help="the folder to write")
    importer.add_argument("--force", action="store_true", help="write into a folder that holds files already")
    add_arguments(importer, ("s3",))
    # For the list of commands only: `service.cli.bench` reads what follows it.
    adder.add_parser(_BENCH, help="Measure start, latency and throughput beside other servers.", add_help=False)
    return parser


def _make(adder: "argparse._SubParsersAction[_Parser] | None", name: str, text: str, examples: str) -> _Parser:
    operands = {"caption": " IMAGE…", "import": " SRC DST", "keygen": " KEY"}.get(name, "")

    def layout(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=100)

    if adder is None:
        return _Parser(name, description=text, epilog=examples, formatter_class=layout, allow_abbrev=False)
    return adder.add_parser(
        name,
        usage=f"snapcap {name} [OPTION…]{operands}",
        help=text,
        description=text,
        epilog=examples,
        formatter_class=layout,
        allow_abbrev=False,
    )
