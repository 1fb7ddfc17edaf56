"""Defines the options of `snapcap caption` and parses them into a job."""

import argparse
import importlib.util
import os
import re
from collections.abc import Container

from snapcap.models.dataclass import dataclass
from snapcap.service.captioning.options import OPTIONS, CaptionOptions, options_from_text
from snapcap.service.config.reader import SettingsError

STDIN = STDOUT = "-"
# Endings of an output, and the module that writes it if it is an extra. A path without an ending is of JSON lines.
ENDINGS = {".jsonl": None, ".ndjson": None, ".csv": None, ".parquet": "pyarrow", "": None}
NOT_READ = "is a URL, and only files are read: download it first, or send it to the chat API of a server"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OFFERED = {name: option for name, option in OPTIONS.items() if option.metavar}


@dataclass(frozen=True)
class Job:
    """Describes one run of `snapcap caption`.

    ``images``: files, folders, patterns, or `-` for a list on standard input. ``output``: the path of a file of
    JSON lines, CSV or Parquet, or `-` for JSON lines on standard output. Without ``output`` and ``sidecar``, the
    run prints each caption as a line of text."""

    images: tuple[str, ...]
    options: CaptionOptions
    recursive: bool = False
    output: str | None = None
    sidecar: bool = False
    resume: bool = False
    overwrite: bool = False

    @property
    def prints(self) -> bool:
        """Tells whether the run writes captions to standard output, as text or as JSON lines."""
        return self.output == STDOUT or not (self.output or self.sidecar)


def add_job_arguments(parser: argparse.ArgumentParser, shown: Container[str] | None = None) -> None:
    """Adds the operands of `snapcap caption`, and the options that `snapcap serve` lacks, to a parser. ``shown``
    names the caption options that the help shows; None: all."""
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="picture (JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF; HEIC with snapcap[heif]), a folder of them, a quoted "
        "pattern such as '*/*.jpg', or - for a list of files on standard input, one a line",
    )
    files = parser.add_argument_group("options: files")
    files.add_argument("-r", "--recursive", action="store_true", help="search subfolders too")
    files.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write file_name, caption and error to a file that ends with .jsonl, .csv or .parquet (with "
        "snapcap[parquet]); -: JSON lines on standard output",
    )
    files.add_argument("--sidecar", action="store_true", help="write image.txt beside each image")
    files.add_argument(
        "--resume",
        action="store_true",
        help="skip images whose caption is in FILE or in a sidecar already; try failed images again",
    )
    files.add_argument("--overwrite", action="store_true", help="replace the captions in FILE and in sidecars")
    sampling = parser.add_argument_group("options: caption")
    for name, option in _OFFERED.items():
        flag, text = "--" + name.replace("_", "-"), option.help[0].lower() + option.help[1:].rstrip(".")
        text = text if shown is None or name in shown else argparse.SUPPRESS
        sampling.add_argument(flag, dest=name, metavar=option.metavar, default=argparse.SUPPRESS, help=text)


def read_job(arguments: argparse.Namespace) -> Job:
    """Returns the job that the arguments describe. Raises SettingsError for options that contradict each other, and
    ServiceError for a bad caption option."""
    given = [(name, getattr(arguments, name)) for name in _OFFERED if hasattr(arguments, name)]
    job = Job(
        images=tuple(arguments.images),
        options=options_from_text(given),
        recursive=arguments.recursive,
        output=arguments.output,
        sidecar=arguments.sidecar,
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )
    _check_places(job)
    if job.resume and job.overwrite:
        raise SettingsError("--resume keeps existing captions and --overwrite replaces them: give one of the two")
    for flag, is_given in (("--resume", job.resume), ("--overwrite", job.overwrite)):
        if is_given and not job.sidecar and job.output in (None, STDOUT):
            raise SettingsError(f"{flag} needs a file to write to: add --output FILE or --sidecar")
    return job


def ending(path: str) -> str:
    """Returns the ending of a path in lower case, such as `.csv`."""
    return os.path.splitext(path)[1].lower()


def is_url(path: str) -> bool:
    """Tells whether an operand is a URL, such as `s3://bucket/photo.jpg`, which `snapcap caption` cannot read."""
    return _URL.match(path) is not None


def _check_places(job: Job) -> None:
    """Raises SettingsError for an operand or an output that cannot be read or written, whatever is in it."""
    for image in filter(is_url, job.images):
        raise SettingsError(f"{image} {NOT_READ}")
    if not all(job.images):  # a shell's variable that is not set
        raise SettingsError("IMAGE is empty: name a picture, a folder or a pattern, or - for a list")
    if job.output is None:
        return
    if is_url(job.output):
        raise SettingsError(f"--output {job.output} is a URL: give a file, and upload it when it is written")
    if ending(job.output) not in ENDINGS:
        endings = ", ".join(filter(None, ENDINGS))
        raise SettingsError(f"--output {job.output} has no known format: end the name with one of {endings}")
    module = ENDINGS[ending(job.output)]
    if module is not None and importlib.util.find_spec(module) is None:
        raise SettingsError(f"--output {job.output} needs {module}: pip install 'snapcap[parquet]'")
