"""Answers two signals without running Python code, which a call into native code may block for ever.

The first signal prints the stacks of all threads, the second ends the process. The HTTP process answers both, the
engine process only the first.
"""

import faulthandler
import signal

# Prints the stack of every thread to standard error; the process goes on.
STACKS = signal.SIGUSR1
# Ends the process at once. SIGKILL cannot be used for the first process of a container: from its children that
# process gets only signals that it has a handler for.
END = signal.SIGUSR2
_STDERR = 2


def print_stacks_on_signal() -> None:
    """Has this process print its stacks on `STACKS`, instead of ending."""
    faulthandler.register(STACKS, _STDERR, all_threads=True)


def end_on_signal() -> None:
    """Has this process exit on `END`, with the signal's number as its status. The handler is the C library's
    `_exit`, because a handler in Python would wait for the interpreter."""
    import ctypes  # noqa: PLC0415  takes 10 ms, so a start imports it late

    library = ctypes.CDLL(None)
    library.signal(int(END), ctypes.cast(library._exit, ctypes.c_void_p))
