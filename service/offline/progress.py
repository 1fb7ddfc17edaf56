"""Shows the progress of a run on standard error: a bar on a terminal, a log line every ten seconds elsewhere."""

import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

_logger = logging.getLogger("snapcap.caption")
_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows nothing. Base class of the bar and the log lines."""

    def begin(self, total: int, what: str) -> None:
        """Starts the count of `total` images. Called when the model is ready."""

    def advance(self, failed: bool) -> None:
        """Counts one more image as captioned or failed."""

    def close(self) -> None:
        """Ends the display."""


def open_progress(captions_on_terminal: bool) -> Progress:
    """Returns the display for standard error: a bar on a terminal, log lines elsewhere. Returns one that shows
    nothing if captions scroll on the terminal, as they show the progress themselves."""
    if not sys.stderr.isatty():
        return LoggedProgress()
    return Progress() if captions_on_terminal else BarProgress()


def open_bar(console: "Console", *, rate: bool) -> "Bar":
    """Returns a progress bar: count of total, images a second if `rate`, elapsed time and remaining time. The bar
    fits one line of any terminal: numbers are never cut, the bar takes a fifth of the width, and the description is
    cut to the remaining width."""
    from rich.progress import (  # noqa: PLC0415  only for a terminal
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar  # noqa: PLC0415
    from rich.table import Column  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    nothing = Text(" ")  # if a column has no width, rich expands no other column
    whole = Column(no_wrap=True)

    class Done(MofNCompleteColumn):
        def render(self, task: Task) -> Text:
            return nothing if task.total is None else super().render(task)

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return nothing if speed is None else Text(f"{speed:.1f}/s")

    class Left(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return nothing if task.time_remaining is None else super().render(task).append(" left")

    return Bar(
        TextColumn(
            "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
        BarColumn(max(4, min(console.width // 5, 24)), table_column=whole),
        Done(table_column=whole),
        *([Rate(table_column=whole)] if rate else []),
        TimeElapsedColumn(table_column=whole),
        Left(table_column=whole),
        console=console,
        expand=True,
        # Standard output is for captions: rich must not draw it above the bar.
        redirect_stdout=False,
        speed_estimate_period=60,
    )


class LoggedProgress(Progress):
    """Logs a line every ten seconds: images done, in total, failed, a second, and the remaining seconds."""

    def __init__(self) -> None:
        self._total = self._done = self._failed = 0
        self._began = self._last = 0.0

    def begin(self, total: int, what: str) -> None:
        self._total = total
        self._began = self._last = time.monotonic()
        if total > 1:
            _logger.info("captioning", extra={"fields": {"images": total, "model": what}})

    def advance(self, failed: bool) -> None:
        self._done += 1
        self._failed += failed
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or self._done == self._total:
            return
        self._last = now
        rate = self._done / (now - self._began)
        fields = {
            "done": self._done,
            "of": self._total,
            "failed": self._failed,
            "images_per_s": round(rate, 1),
            "left_s": round((self._total - self._done) / rate),
        }
        _logger.info("captioning", extra={"fields": fields})


class BarProgress(Progress):
    """Draws a bar with count, rate, elapsed and remaining time. The bar pulses while the model loads."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  only for a terminal

        self._failed = 0
        self._bar = open_bar(Console(stderr=True), rate=True)
        self._what = ""
        self._task = self._bar.add_task("starting", total=None)
        self._bar.start()

    def begin(self, total: int, what: str) -> None:
        self._what = what
        self._bar.reset(self._task, total=total, description=what)

    def advance(self, failed: bool) -> None:
        self._failed += failed
        description = f"{self._failed} failed, {self._what}" if self._failed else self._what
        self._bar.update(self._task, advance=1, description=description)

    def close(self) -> None:
        self._bar.stop()
