"""How processes that are measured are started."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from snapcap.benchmarks.harness import workload


def test_a_build_is_not_told_what_only_a_server_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    workload.build_store(tmp_path, "--model", "demo", "--buckets=1,4", "--decode-threads=3", "--api-key-file=keys")
    assert commands[0][3:] == [
        *("build", "--cache-dir", str(tmp_path)),
        *("--model", "demo", "--buckets=1,4"),
    ]
