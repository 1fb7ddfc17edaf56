"""Answers signals without Python, which a call into native code may hold up for ever: prints stacks, or ends.

Both processes of a server import it, of which the engine's has no event loop to watch.
"""

import faulthandler
import signal

# Prints where every thread is to standard error; the process goes on.
STACKS = signal.SIGUSR1
# Ends the process at once. SIGKILL would, but for the first process of a container: of the signals of its children
# it gets only those that it has a handler for.
END = signal.SIGUSR2
_STDERR = 2


def print_stacks_on_signal() -> None:
    """Answer `STACKS`, instead of ending by it."""
    faulthandler.register(STACKS, _STDERR, all_threads=True)


def end_on_signal() -> None:
    """Answer `END` with an exit whose status is its number, by the system's own `_exit`: a handler of Python's
    would wait for the interpreter."""
    import ctypes  # noqa: PLC0415  a hundredth of a second, which a start has not

    library = ctypes.CDLL(None)
    library.signal(int(END), ctypes.cast(library._exit, ctypes.c_void_p))
