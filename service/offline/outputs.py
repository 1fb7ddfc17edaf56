"""Writes captions to the outputs of a job: printed lines, a file of rows, sidecars.

A file of rows has a row for each image: `file_name`, `caption`, and `error` for an image without a caption. If a
caption names regions of its image, `regions` has them: a list in JSON lines, the list as JSON text in tables. JSON
lines have the format that ImageFolder of `datasets` reads: {"file_name": "a.jpg", "caption": "a red square"}. The
sidecar of `image.jpg` is `image.txt` beside it, as training tools for image models expect.
"""

import codecs
import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from snapcap.service.captioning.model_defaults import Answer
from snapcap.service.config.reader import SettingsError
from snapcap.service.offline.arguments import STDOUT, Job, ending
from snapcap.service.offline.discovery import Failure, Found, OutputError, reason_of
from snapcap.warmup.machine.files import sync, take_lock

# An error with one of these codes repeats for every further image: the disk is full or read-only.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_LONGEST_NAME = 255 - len("..part")  # bytes: file systems allow 255, and a part's name has more than the file's
_ROW_GROUP = 1 << 16  # rows of a Parquet file that are compressed together, and held in memory while it is written


class Row(NamedTuple):
    """Holds what a file says of one image. ``file_name`` is relative to the file's folder if the image is below
    that folder, so that both can be moved together; otherwise it is absolute. ``error`` says why there is no
    caption. ``regions``: a list, or JSON text in a table; None for a caption that names none."""

    file_name: str
    caption: str | None
    error: str | None = None
    regions: Any = None


_ALWAYS = ("file_name", "caption")  # members of every JSON line
_BEGIN = b'{"file_name": "'  # the first bytes of every JSON line
_PLAIN = Row._fields[:-1]  # columns of a table without regions


class Output:
    """Takes the outcomes in the order of the images."""

    def holds(self, image: str) -> bool:
        """Tells whether the output has the caption of an image already and keeps it."""
        return False

    def begin(self, images: Collection[str]) -> None:
        """Prepares the output for the outcomes of these images. Called once, before the first outcome."""

    def write(self, image: str, answer: Answer) -> None:
        """Writes a caption. Raises OSError if this caption cannot be written, OutputError if no caption can be."""
        raise NotImplementedError

    def fail(self, image: str, reason: str) -> None:
        """Writes why an image has no caption, if the output has a place for it. Raises OutputError."""

    def finish(self) -> None:
        """Completes the output after the last outcome of this run. Raises OutputError."""

    def close(self) -> None:
        """Closes the output, whether it was finished or not."""


_PRINTED = "snapcap.printed"


def _printed(error: UnicodeError) -> tuple[str | bytes, int]:
    """Returns bytes of a file name that are not valid text unchanged, and characters that the terminal's encoding
    lacks as escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


class PrintedLines(Output):
    """Prints ``path<TAB>caption`` lines on standard output."""

    def begin(self, images: Collection[str]) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            codecs.register_error(_PRINTED, _printed)
            sys.stdout.reconfigure(errors=_PRINTED, line_buffering=True)

    def write(self, image: str, answer: Answer) -> None:
        try:
            print(f"{image}\t{' '.join(answer.text.splitlines())}")
        except OSError as error:  # the reader of the pipe has closed it, as `head` does
            # The end of the process flushes the buffer: redirected to /dev/null, the flush does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise OutputError(f"captions cannot be printed: {reason_of(error)}") from error


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
            table, how = TABLES.get(ending(job.output)), {"resume": job.resume, "overwrite": job.overwrite}
            self._outputs.append(Table(job.output, table, **how) if table else JsonLines(job.output, **how))
        if not self._outputs:
            self._outputs.append(PrintedLines())
        self.todo = [image for image in images if not all(output.holds(image) for output in self._outputs)]
        self.held = len(images) - len(self.todo)
        self._failures = [each for each in found.failures if each.is_image]
        self._overwrites = job.overwrite

    def begin(self) -> None:
        """Prepares the outputs, and writes the failures that are known before an image is decoded. Raises
        OutputError.

        A run without an image replaces nothing, as its operand may be misspelt."""
        if not self.todo and (self._overwrites or not self._failures):
            return
        images = [*self.todo, *(failure.path for failure in self._failures)]
        for output in self._outputs:
            output.begin(images)
        for failure in self._failures:
            self.fail(failure.path, failure.reason)

    def write(self, image: str, answer: Answer) -> None:
        """Writes a caption to each output that has none of this image. Raises OSError, OutputError."""
        for output in self._outputs:
            if not output.holds(image):
                output.write(image, answer)

    def fail(self, image: str, reason: str) -> None:
        """Writes why an image has no caption to each output that has none of this image. Raises OutputError."""
        for output in self._outputs:
            if not output.holds(image):
                output.fail(image, reason)

    def finish(self) -> None:
        """Completes each output. Raises OutputError."""
        for output in self._outputs:
            output.finish()

    def close(self) -> None:
        for output in self._outputs:
            output.close()


class JsonLines(Output):
    """Appends whole lines to a file or to standard output. Lines are not buffered: a killed process leaves all
    lines written so far."""

    def __init__(self, path: str, *, resume: bool, overwrite: bool) -> None:
        """Opens the file without changing its content. With ``resume``, reads the lines that it has. Raises
        SettingsError if the file cannot be written; another process writes it; it has content and neither
        ``resume`` nor ``overwrite`` is set; or a line is not a row."""
        self.path = path
        self._folder = "." if path == STDOUT else os.path.dirname(path)
        self._captioned: set[str] = set()
        self._failed: set[str] = set()
        self._keep: int | None = None  # length of the file without a partial line; None: not a regular file
        self._file = self._open()
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode) or path == STDOUT:
            return
        if state.st_size and not (resume or overwrite):
            raise _has_captions(path)
        if take_lock(self._file) is False:
            raise SettingsError(f"another process writes {path}: wait for its end, or give another --output")
        self._keep = 0
        for row, line in self.lines() if resume else ():
            (self._captioned if row.error is None else self._failed).add(_key(self._folder, row.file_name))
            self._keep += len(line)

    def holds(self, image: str) -> bool:
        return _key(image) in self._captioned

    def lines(self) -> Iterator[tuple[Row, bytes]]:
        """Yields each whole line of the file and its row. A line without a line break is whole if an editor wrote
        it, and partial if a crash left it."""
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if _is_partial(line):
                    return
                yield self._row(number, line), line.removesuffix(b"\n") + b"\n"

    def begin(self, images: Collection[str]) -> None:
        """Truncates the file: to nothing, or, if it is resumed, by a partial line that a crash left at its end.
        Removes the errors of ``images``, which are captioned again. Raises OutputError."""
        if self._keep is None:
            return
        if os.fstat(self._file).st_size < self._keep:  # the last line lacks its line break
            try:
                os.write(self._file, b"\n")
            except OSError as error:
                raise self._unwritable(error) from error
        os.ftruncate(self._file, self._keep)
        again = self._failed.intersection(map(_key, images))
        if not again:
            return
        try:
            with _replacing(self.path) as file:
                for row, line in self.lines():
                    if row.error is None or _key(self._folder, row.file_name) not in again:
                        file.write(line)
                file.flush()
                take_lock(file.fileno())
                os.dup2(file.fileno(), self._file)
        except OSError as error:
            raise self._unwritable(error) from error
        self._keep = os.fstat(self._file).st_size
        self._failed -= again

    def write(self, image: str, answer: Answer) -> None:
        """Appends the row of a caption. Raises OutputError if the row cannot be written. A regular file then ends
        with the row before."""
        regions = None if answer.regions is None else [region.to_dict() for region in answer.regions]
        self._append(Row(self._name(image), answer.text, regions=regions))
        self._captioned.add(_key(image))

    def fail(self, image: str, reason: str) -> None:
        """Appends the row of an error. Raises OutputError, as `write` does."""
        self._append(Row(self._name(image), None, reason))
        self._failed.add(_key(image))

    def close(self) -> None:
        os.close(self._file)

    def _append(self, row: Row) -> None:
        line = _line(row)
        written = 0
        try:
            while written < len(line):  # a full disk may take a part of the line and fail at the next write
                written += os.write(self._file, line[written:])
        except OSError as error:
            if self._keep is not None:
                os.ftruncate(self._file, self._keep)
            raise self._unwritable(error) from error
        if self._keep is not None:
            self._keep += len(line)

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(f"--output {self.path} cannot be written: {reason_of(error)}")

    def _open(self) -> int:
        if self.path == STDOUT:
            return os.dup(sys.stdout.fileno())
        # A pipe that this process may read has a reader until this process ends. A write would then never fail, but
        # block when the pipe is full; and lines without another reader would be lost.
        regular = os.path.isfile(self.path) or not os.path.exists(self.path)
        flags = os.O_RDWR | os.O_CREAT if regular else os.O_WRONLY
        try:
            return os.open(self.path, flags | os.O_APPEND, 0o666)
        except OSError as error:
            raise SettingsError(f"--output {self.path} cannot be written: {error.strerror}") from None

    def _row(self, number: int, line: bytes) -> Row:
        try:
            value: Any = json.loads(line)
            return Row(
                os.fspath(value["file_name"]), value.get("caption"), value.get("error"), value.get("regions")
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _not_captions(f"{self.path} line {number} is not a caption") from None

    def _name(self, image: str) -> str:
        return os.path.abspath(image).removeprefix(os.path.join(os.path.abspath(self._folder), ""))


class Table(JsonLines):
    """Writes a CSV or Parquet file when the run ends, as neither can be appended to safely.

    Until then the rows lie in a journal of JSON lines beside the table, `captions.parquet.jsonl`. A killed process
    leaves the journal, and a run with ``resume`` adds the journal's rows to the table. The table is replaced as a
    whole, and then the journal is removed."""

    def __init__(self, path: str, format_: "TableFormat", *, resume: bool, overwrite: bool) -> None:
        """Opens the journal without changing its content. With ``resume``, reads the table.

        Raises:
            SettingsError: as JsonLines does; or the file is not a table of captions.
        """
        self._table = path
        self._format = format_
        exists = _size(path) > 0
        if os.path.isdir(path):
            raise SettingsError(f"--output {path} cannot be written: {os.strerror(errno.EISDIR)}")
        if exists and not (resume or overwrite):
            raise _has_captions(path)
        self._adds = exists and resume  # to the rows that the table has
        self._writes = resume  # the rows of a journal that a killed run left
        try:
            self._in_table = {key for key, row in self._table_rows() if row.error is None}
        except OSError as error:
            raise SettingsError(f"--output {path} cannot be read: {reason_of(error)}") from None
        super().__init__(f"{path}.jsonl", resume=resume, overwrite=overwrite)

    def holds(self, image: str) -> bool:
        return _key(image) in self._in_table or super().holds(image)

    def begin(self, images: Collection[str]) -> None:
        """Empties the journal, and removes the table that is overwritten, so that no later run resumes it."""
        self._writes = True
        super().begin(images)
        if not self._adds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.realpath(self._table))

    def finish(self) -> None:
        """Writes the table: the rows that it had, each replaced by a newer row of the same image, then the others.
        Raises OutputError if the table cannot be written. The journal keeps the rows."""
        if not (self._writes and _size(self.path)):
            return
        try:
            # A table without regions has no column for them, as tables of other models.
            has_regions = any(row.regions is not None for row in self._all_rows())
            columns = Row._fields if has_regions else _PLAIN
            with _replacing(self._table) as file:
                self._format.write(file, columns, (row[: len(columns)] for row in self._all_rows()))
        except OSError as error:
            raise OutputError(
                f"--output {self._table} cannot be written: {reason_of(error)}; {self.path} has the captions, and "
                "--resume writes the file"
            ) from error
        os.truncate(self.path, 0)

    def close(self) -> None:
        if not _size(self.path):
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        super().close()

    def _all_rows(self) -> Iterator[Row]:
        newer = self._captioned | self._failed
        yield from (row for key, row in self._table_rows() if key not in newer)
        for row, _ in self.lines():
            # A name that is not UTF-8 is written with escapes, as is its key.
            texts = (*row[:-1], None if row.regions is None else json.dumps(row.regions, ensure_ascii=False))
            yield Row._make(None if value is None else _valid(value) for value in texts)

    def _table_rows(self) -> Iterator[tuple[str, Row]]:
        """Yields the rows that the table has and keeps, each with the key of its image."""
        try:
            for row in self._format.read(self._table) if self._adds else ():
                yield _key(os.path.dirname(self._table), row.file_name), row
        except (ValueError, TypeError, csv.Error):  # pyarrow's errors are ValueErrors
            columns = ", ".join(_PLAIN)
            raise _not_captions(f"{self._table} is not a table of the columns {columns}") from None


class TableFormat(NamedTuple):
    """Reads and writes the rows of a table.

    ``read`` takes a path, and raises ValueError, TypeError or csv.Error if the file is no such table. ``write``
    takes an open file, the names of the columns and the rows."""

    read: Callable[[str], Iterator[Row]]
    write: Callable[[IO[bytes], tuple[str, ...], Iterable[Sequence[str | None]]], None]


def _read_csv(path: str) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        rows = csv.reader(file)
        columns = tuple(next(rows, ()))
        if columns not in (_PLAIN, Row._fields):
            raise ValueError
        for name, caption, error, *regions in rows:
            if len(regions) != len(columns) - len(_PLAIN):
                raise ValueError
            yield Row(name, None, error) if error else Row(name, caption, None, "".join(regions) or None)


def _write_csv(file: IO[bytes], columns: tuple[str, ...], rows: Iterable[Sequence[str | None]]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)  # lines end with CR LF, as RFC 4180 says
    writer.writerow(columns)
    writer.writerows(rows)
    text.detach()


def _read_parquet(path: str) -> Iterator[Row]:
    from pyarrow import parquet  # noqa: PLC0415  an extra

    with parquet.ParquetFile(path) as file:
        if tuple(file.schema_arrow.names) not in (_PLAIN, Row._fields):
            raise ValueError
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield Row(**row)


def _write_parquet(file: IO[bytes], columns: tuple[str, ...], rows: Iterable[Sequence[str | None]]) -> None:
    import pyarrow  # noqa: PLC0415  an extra
    from pyarrow import parquet  # noqa: PLC0415

    schema = pyarrow.schema([(name, pyarrow.string()) for name in columns])
    with parquet.ParquetWriter(file, schema) as writer:
        rows = iter(rows)
        while group := list(islice(rows, _ROW_GROUP)):
            arrays = [pyarrow.array(column, pyarrow.string()) for column in zip(*group, strict=True)]
            writer.write_table(pyarrow.table(arrays, schema=schema))


TABLES = {".csv": TableFormat(_read_csv, _write_csv), ".parquet": TableFormat(_read_parquet, _write_parquet)}


class Sidecars(Output):
    """Writes a text file beside each image. A file is either complete or absent."""

    def __init__(self, *, resume: bool) -> None:
        self._resume = resume

    def holds(self, image: str) -> bool:
        """Tells whether the sidecar exists and is kept. An empty file is no sidecar: a sidecar ends with a
        newline."""
        return self._resume and _size(sidecar(image)) > 0

    def write(self, image: str, answer: Answer) -> None:
        """Writes the sidecar of an image. Raises OSError, and OutputError if the disk is full or read-only; the
        sidecar is then unchanged."""
        path = sidecar(image)
        try:
            with _replacing(path, durable=False) as file:
                file.write(f"{answer.text}\n".encode())
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise OutputError(f"{path} cannot be written: {error.strerror}") from error
            raise


def sidecar(image: str) -> str:
    """Returns the path of an image's sidecar: `a/photo.txt` for `a/photo.jpg`."""
    return f"{os.path.splitext(image)[0]}.txt"


def separate_sidecars(images: Iterable[str]) -> tuple[list[str], list[Failure]]:
    """Returns the images that have a sidecar of their own, and the failures of the others: `a.png` would share the
    sidecar of `a.jpg`."""
    owners: dict[str, str] = {}
    kept, failures = [], []
    for image in images:
        path = sidecar(image)
        owner = owners.setdefault(os.path.abspath(path), image)
        if path == image:
            failures.append(Failure(image, "the image has the name of its own sidecar; rename the image"))
        elif owner is image:
            kept.append(image)
        else:
            failures.append(
                Failure(
                    image, f"the sidecar {os.path.basename(path)} belongs to {owner}; rename one of the two images"
                )
            )
    return kept, failures


def refuse_existing(images: Iterable[str]) -> None:
    """Refuses a run that would replace existing sidecars: a person may have written them. Raises SettingsError if
    an image has a sidecar."""
    existing = [path for path in map(sidecar, images) if _size(path) > 0]
    if existing:
        count = "1 sidecar exists" if len(existing) == 1 else f"{len(existing)} sidecars exist"
        raise SettingsError(f"{count} ({existing[0]}): --resume keeps existing captions, --overwrite replaces them")


def _key(*path: str) -> str:
    """Returns the name under which outputs remember an image: its absolute path, as valid text."""
    return _valid(os.path.abspath(os.path.join(*path)))


def _valid(text: str) -> str:
    """Returns a text in which bytes that are not UTF-8, as in a file name, are escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _line(row: Row) -> bytes:
    value = {name: value for name, value in row._asdict().items() if name in _ALWAYS or value is not None}
    try:
        return f"{json.dumps(value, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # a file name that is not UTF-8; JSON escapes keep its bytes
        return f"{json.dumps(value)}\n".encode()


def _is_partial(line: bytes) -> bool:
    """Tells whether a crash may have cut the line off: it has no line break, and is only the beginning of a row."""
    if line.endswith(b"\n") or line[: len(_BEGIN)] != _BEGIN[: len(line)]:
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _has_captions(path: str) -> SettingsError:
    return SettingsError(f"{path} has captions: --resume keeps them and adds the others, --overwrite replaces them")


def _not_captions(what: str) -> SettingsError:
    return SettingsError(f"{what}; give another --output, or --overwrite it")


@contextlib.contextmanager
def _replacing(path: str, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file that takes the place of another when the block ends without an error. With ``durable``, waits
    until it is on the disk, and replaces the target of a link. Raises OSError; the other file is then unchanged."""
    path = os.path.realpath(path) if durable else path
    folder, name = os.path.split(path)
    # A digest takes the place of a name that has no room for the further bytes.
    encoded = os.fsencode(name)
    short = name if len(encoded) <= _LONGEST_NAME else hashlib.sha256(encoded).hexdigest()
    # Hidden; a fixed name, so that killed runs leave one file at most.
    part = os.path.join(folder, f".{short}.part")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        # O_EXCL creates a new file: it does not follow a link that another user of the folder has put there.
        new = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        with os.fdopen(new, "wb") as file:
            yield file
        if durable:
            sync(Path(part))
        with contextlib.suppress(OSError):
            shutil.copymode(path, part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
