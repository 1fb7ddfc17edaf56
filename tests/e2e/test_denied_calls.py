"""What only saves work or room is never required: a kernel that denies it holds no start up and no caption."""

import re
import sys
from pathlib import Path

import pytest
from support.programs import denied
from support.servers.server_process import ServerProcess

# Those that a file system may lack are for the tests of files.
CALLS = [name for name in denied.NUMBERS if name not in ("fsync", "utimensat", "fchmod", "link", "linkat", "prctl")]


class DeniedServer(ServerProcess):
    """A server whose processes are denied calls, with an error of this name."""

    def __init__(self, error: str, *arguments: str, **environment: str) -> None:
        super().__init__(*arguments, **environment)
        self.program = (denied.__file__, error, ",".join(CALLS), "--", sys.executable, "-m", "snapcap")


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_calls_that_only_save_work_may_be_denied(error: str, built_cache: Path, samples: dict[Path, str]) -> None:
    """As by systemd's `SystemCallFilter=~@resources`, or a sandbox of containers."""
    options = ("--cache-dir", str(built_cache), "--strict", "--backend", "aot", "--buckets", "1,4")
    with DeniedServer(error, *options) as server:
        assert server.wait_ready().startup()["tier"] == "aot"
        for path, caption in samples.items():
            assert server.caption(path)["caption"] == caption
        log = server.log()
    assert "Traceback" not in log
    said = re.findall(r"warning +(\S+) is not available", log)
    assert {"memfd_create", "nice", "getrlimit"} <= set(said)
    assert said.count("seccomp") == 1, "the first decode process says it for all"
    assert max(map(said.count, said)) <= 3, "once for a process, and not for each picture"
