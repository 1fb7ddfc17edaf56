"""Forks the decode processes from one parent, which has imported every codec, and replaces those that die.

The parent has one thread and no other work, so it can fork safely at any time. The HTTP process cannot. When the
HTTP process has closed its sockets to the decode processes and to their parent, all of them end.
"""

import logging
import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path

from snapcap.models.processing.image_formats import ImageError
from snapcap.service.images.decode import with_library
from snapcap.service.images.messages import Began, Ended, NoneBegan, Notice, Setup
from snapcap.service.images.worker import decode_images
from snapcap.service.ipc.fork import fork_child, settle
from snapcap.service.ipc.framing import RECEIVE_BYTES, pack, receive_message
from snapcap.service.ipc.shared_pixels import image_file
from snapcap.warmup.machine.confined import forget_environment
from snapcap.warmup.machine.denied import process_limit, report_denied

# Seconds before a dead process is replaced, so that a fault that ends every process does not keep a CPU busy.
PAUSE_S = 0.05
# Seconds before the next try when memory, processes or the server's open files have run out.
FULL_S = 1.0
# Bytes of a process's standard error that are logged: the last ones of what its pipe holds.
_LAST_WORDS = 2000
_PIPE_BYTES = 64 << 10
# Decode processes have a lower priority: if CPUs are short, images wait, and the HTTP process still answers.
_NICE = 5
_logger = logging.getLogger("snapcap.decode")


def picture() -> bytes:
    """Returns the server's own picture, a JPEG of 500 x 375 pixels, which is decoded before any client's image: by
    the parent before it forks, and in the rehearsal. The picture is a file, because the HTTP process may lack
    Pillow to make one."""
    return Path(__file__).with_name("sample.jpg").read_bytes()


def serve_image_processes(count: int, end: socket.socket) -> int:
    """Keeps `count` decode processes running until the server ends. Returns the exit status 0."""
    forget_environment()
    try:
        os.nice(_NICE)
    except OSError as error:
        report_denied("nice", "processes that decode images have the server's priority", str(error.strerror))
    # The parent alone imports the codecs, while the server finds the checkpoint.
    from snapcap.models.processing.image import load_codecs  # noqa: PLC0415

    load_codecs()

    setup = _setup(end)
    if setup is None:
        return 0
    process_limit(resource.RLIMIT_AS)  # logs a denial once, here, instead of in each process
    with suppress(ImageError):  # runs work of the first image before the fork, such as loading codec tables
        setup.transform.decode(picture())
    settle()
    with suppress(OSError):  # the server has ended, and the kernel ends the remaining processes
        _Family(count, end, setup).keep()
    return 0


def _setup(end: socket.socket) -> Setup | None:
    """Returns the setup, whose transform has the image library, if the server has sent it."""
    try:
        setup, library = receive_message(end, [])
    except EOFError:
        return None
    # Loaded before the fork: decode processes can open no file.
    return Setup(with_library(setup.transform, library), setup.most)


class _Family:
    """Keeps `count` decode processes running."""

    def __init__(self, count: int, end: socket.socket, setup: Setup) -> None:
        self._count = count
        self._end = end
        self._setup = setup
        self._began: dict[int, int] = {}  # by process: the pipe that has its standard error
        self._report = True  # the first process logs which calls the system denies to each of them

    def keep(self) -> None:
        """Replaces ended processes, and returns when the server has ended. Raises OSError if the server's socket
        is closed."""
        while True:
            while len(self._began) < self._count:
                self._add()
            if not self._began:
                return
            pause = 0.0
            pid, status = os.waitpid(-1, 0)
            while pid:
                pause = max(pause, self._ended(pid, os.waitstatus_to_exitcode(status)))
                pid, status = os.waitpid(-1, os.WNOHANG) if self._began else (0, 0)
            time.sleep(pause)

    def _ended(self, pid: int, code: int) -> float:
        """Tells the server that a process has ended. Returns the seconds to wait before the next one is forked."""
        self._log_errors(pid, self._began.pop(pid))
        pause = PAUSE_S
        try:
            # After the setup the server sends a message for each process that it had no room for, and nothing else.
            if self._end.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT):
                pause = FULL_S
            else:  # the server has ended or is ending: it closes this socket before those of the decode processes
                self._count = 0
        except BlockingIOError:
            pass
        except OSError:
            self._count = 0
        if not self._count:
            return 0.0
        self._tell(Ended(pid, code))
        return pause

    def _log_errors(self, pid: int, pipe: int) -> None:
        """Logs what an ended process wrote to standard error, in a single line of bounded length."""
        with os.fdopen(pipe, "rb", buffering=0) as file:
            words = file.read(_PIPE_BYTES) or b""  # None if a process that goes on has the pipe too
        if words:
            text = words[-_LAST_WORDS:].decode(errors="replace")
            _logger.warning("last words of a decode process", extra={"fields": {"pid": pid, "said": text}})

    def _add(self) -> None:
        (transform, most), report, files = self._setup, self._report, list[int]()
        try:
            files += os.pipe()
            files.append(image_file(transform.size))
            pipe, errors, file = files
            # A full pipe makes nobody wait: the process goes on, and what it writes is lost.
            os.set_blocking(pipe, False)
            os.set_blocking(errors, False)
            child = fork_child(lambda end: decode_images(end, file, errors, transform, most, report), [self._end])
        except OSError as error:  # no memory, or too many processes or open files
            for each in files:
                os.close(each)
            _logger.warning("no decode process", extra={"fields": {"error": str(error)}})
            self._tell(NoneBegan(error.errno or 0))
            time.sleep(FULL_S)
            return
        self._report = False
        self._began[child.pid] = pipe
        # Only the HTTP process keeps the socket and the file, so that the socket closes when the decode process
        # dies.
        try:
            self._tell(Began(child.pid), child.end.fileno(), file)
        finally:
            child.end.close()
            os.close(file)
            os.close(errors)

    def _tell(self, notice: Notice, *files: int) -> None:
        socket.send_fds(self._end, [pack(notice)], files)
