"""A signal while torch is imported, which its C++ would turn into an abort."""

import subprocess
import sys
from pathlib import Path

import pytest

SIGNALS = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nprint('went on')"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from snapcap.service.cli.interrupt import Interrupted, interruptible
try:
    with interruptible():
        import {module}
except Interrupted as interrupted:
    print("raised", interrupted.status)
"""


def run(folder: Path, module: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM.format(module=module), str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("inner", [False, True])
def test_a_signal_while_torch_is_imported_ends_the_process_at_once(tmp_path: Path, inner: bool) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import torch.inner" if inner else SIGNALS)
    (tmp_path / "torch" / "inner.py").write_text(SIGNALS)
    ended = run(tmp_path, "torch")
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "snapcap: interrupted; run the command again to continue\n"


def test_a_signal_while_anything_else_is_imported_is_raised(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(SIGNALS)
    ended = run(tmp_path, "other")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "raised 130\n", "")
