"""Writes captions to the outputs of a job: printed lines, a file of JSON lines, sidecars."""

import io
import os
import sys
from typing import Protocol

from snapcap.service.offline.arguments import Job
from snapcap.service.offline.discovery import Found
from snapcap.service.offline.failure import OutputError, reason_of
from snapcap.service.offline.json_lines import JsonLines
from snapcap.service.offline.sidecars import Sidecars, refuse_existing, separate_sidecars


class Output(Protocol):
    """Takes captions in the order of the images."""

    def holds(self, image: str) -> bool:
        """Tells whether the output has the caption of an image already and keeps it."""

    def begin(self) -> None:
        """Prepares the output. Called once, before the first caption."""

    def write(self, image: str, caption: str) -> None:
        """Writes a caption. Raises OSError if this caption cannot be written, OutputError if no caption can be."""

    def close(self) -> None: ...


class PrintedLines:
    """Prints ``path<TAB>caption`` lines on standard output."""

    def holds(self, image: str) -> bool:
        return False

    def begin(self) -> None:
        # Bytes of a file name that are not valid text are printed unchanged.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape", line_buffering=True)

    def write(self, image: str, caption: str) -> None:
        try:
            print(f"{image}\t{' '.join(caption.splitlines())}")
        except OSError as error:  # the reader of the pipe has closed it, as `head` does
            # The end of the process flushes the buffer: redirected to /dev/null, the flush does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise OutputError(f"captions cannot be printed: {reason_of(error)}") from error

    def close(self) -> None:
        pass


class Outputs:
    """Writes all outputs of a job, and finds the images that an output lacks."""

    def __init__(self, job: Job, found: Found) -> None:
        """Raises SettingsError if captions exist and the job neither resumes nor overwrites."""
        self._outputs: list[Output] = []
        images = found.images
        if job.sidecar:
            images, failures = separate_sidecars(images)
            found.failures.extend(failures)
            if not (job.resume or job.overwrite):
                refuse_existing(images)
            self._outputs.append(Sidecars(resume=job.resume))
        if job.output is not None:
            self._outputs.append(JsonLines(job.output, resume=job.resume, overwrite=job.overwrite))
        if not self._outputs:
            self._outputs.append(PrintedLines())
        self.todo = [image for image in images if not all(output.holds(image) for output in self._outputs)]
        self.held = len(images) - len(self.todo)

    def begin(self) -> None:
        for output in self._outputs:
            output.begin()

    def write(self, image: str, caption: str) -> None:
        """Writes a caption to each output that has none of this image. Raises OSError, OutputError."""
        for output in self._outputs:
            if not output.holds(image):
                output.write(image, caption)

    def close(self) -> None:
        for output in self._outputs:
            output.close()
