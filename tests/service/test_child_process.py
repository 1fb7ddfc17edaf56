"""Forks as their parents see them."""

import subprocess
import sys
from pathlib import Path

from support.server_process import clean_environment

PROGRAM = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from service.child_process import fork_child
child = fork_child(lambda end: 3, [])
print(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
"""


def test_a_child_is_waited_for_even_where_the_signal_of_its_end_is_ignored() -> None:
    """As whoever started the server may have left it."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean_environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.stdout, run.stderr) == ("3\n", "")
