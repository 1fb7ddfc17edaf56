"""Forks as their parents see them."""

from support.servers.server_process import python

PROGRAM = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from snapcap.service.ipc.fork import fork_child
child = fork_child(lambda end: 3, [])
print(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
"""


def test_a_child_is_waited_for_even_where_the_signal_of_its_end_is_ignored() -> None:
    """As whoever started the server may have left it."""
    run = python("-c", PROGRAM)
    assert (run.stdout, run.stderr) == ("3\n", "")
