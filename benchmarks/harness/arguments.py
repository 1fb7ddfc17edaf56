"""Parses values of options, and adds the options that measurements share."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from snapcap.warmup.option import parse_int, parse_seconds

Value = TypeVar("Value")


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Returns a program's parser. ``text`` is its docstring, whose lines are shown as they are."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def make_server_parser(text: str | None, port: int) -> argparse.ArgumentParser:
    """Returns the parser of a program that serves transformers' model: ``port`` is the default port."""
    parser = make_parser(text)
    parser.add_argument("--model", default="models/demo", help="checkpoint folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--batch", type=int, default=0, help="greatest number of images in a batch; 0: no batches")
    return parser


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds `--cache` and `--json`, which every measurement has."""
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep models and artifact sets in FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tables and raw samples to FILE")


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns a parser of "all" or "one,two", which gives the named items, each once, in the order of ``names``."""
    known = list(names)

    def read(text: str) -> list[str]:
        wanted = set(known) if text == "all" else {name.strip() for name in text.split(",") if name.strip()}
        if not wanted or wanted - set(known):
            raise argparse.ArgumentTypeError(f"must be all, or some of {', '.join(known)}")
        return [name for name in known if name in wanted]

    return read


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Adds `--serve`, for measurements that start servers."""
    parser.add_argument(
        "--serve", default="", metavar="OPTIONS", help="options for snapcap serve, such as --serve=--buckets=1,4"
    )


def typed(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Returns a parser of snapcap's options in the form that argparse needs."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must {error}") from None

    return read


count, seconds = typed(parse_int(1)), typed(parse_seconds(above=True))


def counts(text: str) -> list[int]:
    """Parses "4,1,16" to [1, 4, 16]."""
    return sorted({count(word) for word in text.split(",")})
