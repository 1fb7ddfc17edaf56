"""Runs the `snapcap` command, and returns an exit status of `ExitStatus`."""

import argparse
import os
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from snapcap.models.errors import suggestion
from snapcap.service.config.reader import (
    BUILD_GROUPS,
    BUILD_WITHOUT,
    Parser,
    SettingsError,
    add_arguments,
    read_settings,
)
from snapcap.service.config.settings import GROUPS
from snapcap.service.errors import ServiceError
from snapcap.service.readiness import ExitStatus
from snapcap.warmup.option import options_of

if TYPE_CHECKING:
    from snapcap.service.server.processes import ForkedEngine

_VERSION = "--version"
_BENCH = "bench"
_BUILD_ALONE = ("weights",)


def main(arguments: Sequence[str], engine: "ForkedEngine | None" = None) -> int:
    """Runs a command and returns its exit status. ``engine`` is the engine process of `serve`, if it is forked."""
    try:
        return _run(list(arguments), engine)
    except (SettingsError, ServiceError) as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return ExitStatus.BAD_OPTION


class _Command(NamedTuple):
    """A command. ``operands`` is their text in the usage line. ``add`` adds the operands and options to a parser.
    Only the parser of the given command is made, because making all parsers would cost a start more time than
    reading its settings. ``shown`` names the options in its help, if only `--help-all` shows the others."""

    summary: str
    examples: str
    operands: str
    add: Callable[[argparse.ArgumentParser, Container[str] | None], None]
    run: Callable[[argparse.Namespace], int]
    shown: Container[str] | None = None


class _HelpAll(argparse.Action):
    """Prints the help with all options of a command, and ends as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _command_parser(str(self.const), _COMMANDS[str(self.const)], None).print_help()
        parser.exit()


def _run(arguments: list[str], engine: "ForkedEngine | None") -> int:
    if not arguments:
        _top_parser().print_help(sys.stderr)
        return ExitStatus.BAD_OPTION
    name, rest = arguments[0], arguments[1:]
    if name == _VERSION:
        # Imported here, because the import takes 10 ms of every command's start.
        from snapcap.warmup.version import snapcap_version  # noqa: PLC0415

        print(f"snapcap {snapcap_version()}")
        return 0
    if name == _BENCH:  # its options are its own
        from snapcap.benchmarks.command import main as bench  # noqa: PLC0415

        return bench(rest)
    if name not in _COMMANDS:
        if name.startswith("-"):
            _top_parser().parse_known_args(arguments)  # --help ends here
            # The argument is an option before its command, or an option of no command.
            raise _unknown(
                name, [option.flag for group in GROUPS.values() for option in options_of(group).values()]
            )
        raise SettingsError(f"unknown command {name!r}{suggestion(name, [*_COMMANDS, _BENCH])}; see snapcap --help")
    command = _COMMANDS[name]
    parser = _command_parser(name, command, command.shown)
    known, unknown = parser.parse_known_args(rest)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        raise _unknown(unknown[0], flags, f"{name} ")
    return _serve(known, engine) if command.run is _serve else command.run(known)


def _unknown(word: str, flags: Iterable[str], command: str = "") -> SettingsError:
    word = word.partition("=")[0]
    what = "option" if word.startswith("-") else "argument"
    return SettingsError(f"unknown {what} {word}{suggestion(word, flags)}; see snapcap {command}--help")


def _serve(arguments: argparse.Namespace, engine: "ForkedEngine | None" = None) -> int:
    settings = read_settings(arguments, os.environ)
    # Imported here, so that bad options are reported and help is printed without importing a server.
    from snapcap.service.server.serve import leave, serve  # noqa: PLC0415

    leave(serve(settings, engine))


def _build(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, os.environ)
    from snapcap.service.cli.interrupt import Interrupted, interruptible  # noqa: PLC0415
    from snapcap.service.server.serve import leave  # noqa: PLC0415
    from snapcap.warmup.machine.installation import has_torch_module  # noqa: PLC0415

    if not has_torch_module():  # checked here, because the modules of a build import torch
        raise SettingsError(_NO_TORCH_MODULE)
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

    return explain(settings, show_all=arguments.all)


def _keygen(arguments: argparse.Namespace) -> int:
    """Makes an Ed25519 key pair: writes the private key (mode 0600) and, beside it, the public key."""
    from snapcap.warmup.artifacts.signing import KeyFileError, generate_key  # noqa: PLC0415

    private = Path(arguments.key)
    try:
        public = generate_key(private)
    except KeyFileError as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    print(f"{private}\tprivate: `snapcap build --sign-key {private}`; keep it where builds run")
    print(f"{public}\tpublic: `snapcap serve --trusted-key {public}`")
    return 0


def _caption(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, os.environ)
    from snapcap.service.offline.arguments import read_job  # noqa: PLC0415

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
    from snapcap.warmup.checkpoints.local import CheckpointError  # noqa: PLC0415

    try:
        written = import_checkpoint(arguments.source, Path(arguments.destination), settings.s3, arguments.force)
    except (CheckpointError, ConfigError) as error:
        print(f"snapcap: {error}", file=sys.stderr)
        return ExitStatus.START_FAILED
    print(*written, sep="\n")
    return 0


def _add_serve(parser: argparse.ArgumentParser, shown: Container[str] | None) -> None:
    add_arguments(parser, GROUPS, without=_BUILD_ALONE, shown=shown)


def _add_build(parser: argparse.ArgumentParser, _: Container[str] | None) -> None:
    add_arguments(parser, BUILD_GROUPS, without=BUILD_WITHOUT)


def _add_explain(parser: argparse.ArgumentParser, _: Container[str] | None) -> None:
    # `explain` takes the options that decide about the key, about the store, and about signatures to accept.
    # --sign-key is among them: its own public key is accepted.
    only_builds = ("prepared_weights", "build_workers", "build_timeout", "remote_cache")
    parser.add_argument(
        "--all", action="store_true", help="show every factor of the key, not only factors that differ"
    )
    add_arguments(parser, BUILD_GROUPS, without=(*BUILD_WITHOUT, *only_builds, *_BUILD_ALONE))


def _add_keygen(parser: argparse.ArgumentParser, _: Container[str] | None) -> None:
    parser.add_argument("key", metavar="KEY", help="file of the private key; must not exist")


def _add_caption(parser: argparse.ArgumentParser, shown: Container[str] | None) -> None:
    from snapcap.service.offline.arguments import add_job_arguments  # noqa: PLC0415 - other commands do not need it

    add_job_arguments(parser, shown)
    # `snapcap caption` builds nothing in the background, and decodes images in threads, which cannot be killed.
    without = ("build", "build_workers", "decode_memory", "decode_timeout", *_BUILD_ALONE)
    add_arguments(parser, ("model", "compute", "images", "store", "s3", "log"), without=without, shown=shown)


def _add_import(parser: argparse.ArgumentParser, _: Container[str] | None) -> None:
    parser.add_argument("source", metavar="SRC", help="a folder, a hub id, or s3://bucket/prefix")
    parser.add_argument("destination", metavar="DST", help="the folder to write")
    parser.add_argument("--force", action="store_true", help="write into a folder that holds files already")
    add_arguments(parser, ("s3",))


_ENVIRONMENT = "The variable in an option's brackets sets the option too; the command line overrides the variable."
_TAGLINE = "Captions images, over HTTP or from the command line, with models that are compiled before they start."
# Names of the options that most servers need. `serve --help-all` shows all options.
SERVE_SHOWN = (
    "model",
    "device",
    "backend",
    "buckets",
    "host",
    "port",
    "api_key_file",
    "store",
    "trusted_key",
    "log_format",
)
# Names of the options that most runs of `snapcap caption` need, beside its files.
CAPTION_SHOWN = ("prompt", "num_beams", "max_new_tokens", "model", "device", "store", "log_format")
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
`snapcap serve --help-all` lists all options, including the limits of requests, memory and time.

examples:
  snapcap serve
  snapcap serve --model s3://bucket/captioner --device cuda:0 --log-format json
  SNAPCAP_PORT=9000 snapcap serve
  curl --data-binary @photo.jpg localhost:8000/v1/caption

{_ENVIRONMENT}
"""
_BUILD = f"""\
examples:
  snapcap build                                             into the default folder of `snapcap serve`
  snapcap build --store s3://bucket/snapcap --sign-key KEY  once for a fleet of equal machines
  snapcap build --backend jit                               cache artifacts for `snapcap serve --backend jit`

A second build of the same key does nothing. A build after an interrupted one reuses its packages.
Exit status 0: the store has the artifacts; 1: the build failed; 2: the command line is wrong; 3: the
model cannot be read; 130: interrupted (143 by SIGTERM).
{_ENVIRONMENT}
"""
_EXPLAIN = f"""\
examples:
  snapcap explain
  snapcap explain --all                          with every factor of the key
  snapcap explain --store s3://bucket/snapcap --trusted-key KEY.pub

Exit status 0: the store has the artifacts; 1: it does not, and the factors that differ from the
nearest artifacts are listed; 2: the command line is wrong; 3: the model cannot be read.
{_ENVIRONMENT}
"""
_KEYGEN = """\
examples:
  snapcap keygen artifacts.key
  snapcap build --store s3://bucket/snapcap --sign-key artifacts.key
  snapcap serve --store s3://bucket/snapcap --trusted-key artifacts.key.pub
"""
_CAPTION = f"""\
`snapcap caption --help-all` lists all options: how tokens are chosen, compiling, S3 and logs.

examples:
  snapcap caption photo.jpg
  snapcap caption --prompt "a red" *.png
  snapcap caption photos --recursive --output captions.parquet
  snapcap caption photos --sidecar --resume      write photo.txt beside each photo.jpg that has none
  find . -name '*.jpg' -newer last | snapcap caption -

No file is replaced without --overwrite. An image that cannot be read is listed at the end and has
an error in FILE; the others are captioned. After an interruption, --resume captions the remaining
images.

Exit status 0: every image has a caption; 1: some images have none; 2: the command line is wrong, or
the output exists already; 3: the model cannot be started; 4: the engine or its device was lost;
130: interrupted (143 by SIGTERM).
{_ENVIRONMENT}
"""
_IMPORT = f"""\
examples:
  snapcap import nlpconnect/vit-gpt2-image-captioning ./captioner
  snapcap serve --model ./captioner

{_ENVIRONMENT}
"""

_NO_TORCH_MODULE = (
    "torch's libraries are installed here without its Python module, which a build needs: build where torch is "
    "installed completely, as in the image of the Dockerfile's target builder"
)

_COMMANDS = {
    "serve": _Command("Serve a model over HTTP.", _SERVE, "", _add_serve, _serve, SERVE_SHOWN),
    "build": _Command(
        "Compile a model's artifacts on this machine and publish them to a store.", _BUILD, "", _add_build, _build
    ),
    "explain": _Command(
        "Show which artifacts a start on this machine needs, and whether the store has them.",
        _EXPLAIN,
        "",
        _add_explain,
        _explain,
    ),
    "keygen": _Command(
        "Make a key pair for signing artifacts: KEY and KEY.pub.", _KEYGEN, " KEY", _add_keygen, _keygen
    ),
    "caption": _Command(
        "Caption images and folders of images without a server.",
        _CAPTION,
        " IMAGE…",
        _add_caption,
        _caption,
        CAPTION_SHOWN,
    ),
    "import": _Command(
        "Convert a checkpoint to a folder that starts fast: safetensors and tokenizer.json.",
        _IMPORT,
        " SRC DST",
        _add_import,
        _import,
    ),
}


def _top_parser() -> Parser:
    parser = Parser("snapcap", description=_TAGLINE, epilog=_TOP, formatter_class=_layout, allow_abbrev=False)
    parser.add_argument(_VERSION, action="store_true", help="print the version and exit")
    adder = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in _COMMANDS.items():
        adder.add_parser(name, help=command.summary)
    adder.add_parser(_BENCH, help="Measure start, latency and throughput beside other servers.")
    return parser


def _command_parser(name: str, command: _Command, shown: Container[str] | None) -> Parser:
    """Returns the parser of a command. ``shown`` names the options in its help, None all; the parser accepts the
    others too."""
    parser = Parser(
        f"snapcap {name}",
        usage=f"snapcap {name} [OPTION…]{command.operands}",
        description=command.summary,
        epilog=command.examples,
        formatter_class=_layout,
        allow_abbrev=False,
    )
    if command.shown is not None:
        text = "show all options, and exit"
        parser.add_argument("--help-all", action=_HelpAll, nargs=0, const=name, help=text)
    command.add(parser, shown)
    return parser


def _layout(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=100)
