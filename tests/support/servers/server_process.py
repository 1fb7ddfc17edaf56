"""Runs a real `snapcap` in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.processes import children


def clean_environment(**extra: str) -> dict[str, str]:
    """Returns this environment without variables that configure snapcap.

    Byte code is kept, as in an installation: otherwise each process would compile a hundred modules again. Weights
    are prepared only by tests that ask for it: otherwise each of hundreds of servers would have a process beside it
    that imports torch. The variables of `make` are removed: otherwise a test's `make serve` would get the ARGS of
    `make test`."""
    unwanted = ("SNAPCAP_", "PYTHONDONTWRITEBYTECODE", "MAKE", "MFLAGS", "ARGS", "WORKERS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return {**kept, "OMP_NUM_THREADS": "2", "SNAPCAP_PREPARED_WEIGHTS": "false", **extra}


def snapcap(*arguments: str, timeout: float = 300, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return python("-m", "snapcap", *arguments, timeout=timeout, **environment)


def python(
    *arguments: str, timeout: float = 120, stdin: str = "", **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run Python to its end. `stdin`: what it reads there."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=clean_environment(**environment),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def wait_until(what: Callable[[], bool], seconds: float = 60) -> None:
    """Poll until it is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def reserved_port() -> socket.socket:
    """Returns a socket that is bound to a port of 127.0.0.1. The socket keeps the port from programs that ask for
    any port, and lets a server listen on it. Until then, connections are refused."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _prepared(arguments: tuple[str, ...]) -> dict[str, str]:
    """Prepared weights are used where the cache folder has some, as by default everywhere."""
    folders = [Path(value) for name, value in pairwise(arguments) if name == "--cache-dir"]
    found = any((folder / "store" / "weights").is_dir() for folder in folders)
    return {"SNAPCAP_PREPARED_WEIGHTS": "true"} if found else {}


class ServerProcess:
    """`snapcap serve` on a free port; a context manager that kills it."""

    interpreter = sys.executable
    program: tuple[str, ...] = ("-m", "snapcap")

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._reserved = reserved_port()
        self.port: int = self._reserved.getsockname()[1]
        self._arguments = arguments
        self._environment = {**_prepared(arguments), **environment}
        # A file: a pipe that nobody reads fills up, and then the server stands still in the middle of a log line.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def __enter__(self) -> "ServerProcess":
        command = [self.interpreter, *self.program, "serve", "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *self._arguments],
            env=clean_environment(**self._environment),
            stderr=self._log,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def engine_pid(self) -> int:
        """Returns the id of the engine process, which exists once /livez has answered."""
        return children(self.process.pid)[0]

    @property
    def decode_parent_pid(self) -> int:
        """Returns the id of the process that forks the decode processes, if the server has any."""
        return children(self.process.pid)[1]

    @property
    def decode_pids(self) -> list[int]:
        """Returns the ids of the decode processes."""
        return children(self.decode_parent_pid)

    def log(self) -> str:
        """Returns the server's log so far."""
        self._log.seek(0)
        return self._log.read()

    def call(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (JSON where it is JSON) and headers; status 0 when nobody listens."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                status, data, fields = reply.status, reply.read(), dict(reply.headers)
        except urllib.error.HTTPError as error:
            status, data, fields = error.code, error.read(), dict(error.headers)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0, None, {}
        kind = fields.get("content-type", fields.get("Content-Type", ""))
        is_json = "json" in kind and "ndjson" not in kind  # lines of JSON stay text
        return status, json.loads(data) if is_json else data.decode(), fields

    def caption(self, image: Path, query: str = "") -> dict[str, Any]:
        status, body, _ = self.call(f"/v1/caption{query}", image.read_bytes())
        assert status == 200, body
        result: dict[str, Any] = body
        return result

    def wait_for(self, what: Callable[[], bool], seconds: float = 120) -> None:
        """Poll until it is true; fails with the log when the process ends first."""
        begun = time.monotonic()
        while not what():
            if self.process.poll() is not None:
                raise AssertionError(f"snapcap ended with {self.process.returncode}: {self.log()}")
            waited = time.monotonic() - begun
            assert waited < seconds, f"not within {seconds} s: {self.call('/startup')[1]}"
            time.sleep(0.04 if waited < 3 else 0.2)  # a start needs the CPU time of a call, and a long one compiles

    def wait_ready(self) -> "ServerProcess":
        self.wait_for(lambda: self.call("/readyz")[0] == 200)
        return self

    def startup(self) -> dict[str, Any]:
        body: dict[str, Any] = self.call("/startup")[1]
        return body

    def metrics(self) -> dict[str, float]:
        """Values by the full sample name, labels included."""
        lines = self.call("/metrics")[1].splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)
