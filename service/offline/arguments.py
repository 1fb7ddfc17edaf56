"""Defines the options of `snapcap caption` and parses them into a job."""

import argparse

from snapcap.models.dataclass import dataclass
from snapcap.service.captioning.options import OPTIONS, CaptionOptions, options_from_text
from snapcap.service.config.reader import SettingsError

STDIN = STDOUT = "-"
_OFFERED = {name: option for name, option in OPTIONS.items() if option.metavar}


@dataclass(frozen=True)
class Job:
    """Describes one run of `snapcap caption`.

    ``images``: files, folders, patterns, or `-` for a list on standard input. ``output``: the path of a JSON lines
    file, or `-` for standard output. Without ``output`` and ``sidecar``, the run prints each caption as a line of
    text."""

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


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the operands of `snapcap caption`, and the options that `snapcap serve` lacks, to a parser."""
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
        "-o", "--output", metavar="FILE", help="write JSON lines of file_name and caption; -: to standard output"
    )
    files.add_argument("--sidecar", action="store_true", help="write image.txt beside each image")
    files.add_argument(
        "--resume", action="store_true", help="skip images whose caption is in FILE or in a sidecar already"
    )
    files.add_argument("--overwrite", action="store_true", help="replace the captions in FILE and in sidecars")
    sampling = parser.add_argument_group("options: caption")
    for name, option in _OFFERED.items():
        flag, text = "--" + name.replace("_", "-"), option.help[0].lower() + option.help[1:].rstrip(".")
        sampling.add_argument(flag, dest=name, metavar=option.metavar, default=argparse.SUPPRESS, help=text)


def read_job(arguments: argparse.Namespace) -> Job:
    """Returns the job that the arguments describe.

    Raises SettingsError for options that contradict each other, and ServiceError for a bad caption option."""
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
    if job.resume and job.overwrite:
        raise SettingsError("--resume keeps existing captions and --overwrite replaces them: give one of the two")
    for flag, is_given in (("--resume", job.resume), ("--overwrite", job.overwrite)):
        if is_given and not job.sidecar and job.output in (None, STDOUT):
            raise SettingsError(f"{flag} needs a file to write to: add --output FILE or --sidecar")
    return job
