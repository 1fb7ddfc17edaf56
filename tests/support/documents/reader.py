"""Runs the commands of a page as its reader would: one after the other, beside the server that one starts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image
from support.documents.pages import ROOT, Block
from support.servers.server_process import clean_environment, reserved_port

from snapcap.benchmarks.harness.processes import children

_SERVER = re.compile(r"(?:[A-Z_]+=\S+ )*(?:snapcap|make) serve\b")
_SAMPLE = re.compile(r"models/demo/samples/[\w-]+\.png")
_PHOTOS = ("photo.jpg", "photos/one.jpg", "photos/below/two.jpg")


class Reader:
    """A clone of the repository with an environment that has snapcap, two photographs, and an empty home folder.

    A command that serves goes on until the next one or the end; a context manager that ends it. ``captions``: of
    the demo model's samples: a Python program that names one has to print its caption."""

    def __init__(self, folder: Path, captions: dict[Path, str], **environment: str) -> None:
        self._captions, self._folder, self._reserved = captions, folder / "clone", reserved_port()
        self._port: int = self._reserved.getsockname()[1]
        home = folder / "home"
        for each in (home, self._folder, self._folder / ".venv"):
            each.mkdir(parents=True, exist_ok=True)
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry.name != "build":
                (self._folder / entry.name).symlink_to(entry)
        binaries = Path(sys.executable).parent
        (self._folder / ".venv" / "bin").symlink_to(binaries)
        for stamp in (".torch", ".serve", ".dev"):  # set up a moment ago, so that make does not
            (self._folder / ".venv" / stamp).touch()
        for name, sample in zip(_PHOTOS, captions, strict=False):
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.open(sample).convert("RGB").save(self._folder / name)
        self._environment = clean_environment(
            HOME=str(home),
            PATH=f"{binaries}:{os.environ['PATH']}",
            SNAPCAP_BUILD="off",  # a build behind every server would take minutes of both CPUs
            SNAPCAP_BUCKETS="1,4",
            SNAPCAP_HOST="127.0.0.1",
            SNAPCAP_PORT=str(self._port),
            **environment,
        )
        self._server: subprocess.Popen[bytes] | None = None
        self._is_made = False  # by make, whose child it is then
        self._printed = ""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_server(must_end_well=kind is None)
        self._reserved.close()

    def run(self, block: Block) -> None:
        """Run a block; fails where it does, or prints something else than what the page says."""
        text = block.text.replace("localhost:8000", f"127.0.0.1:{self._port}")
        if block.language == "python":
            self._printed = self._finish(block, [sys.executable, "-c", text])
            for sample in set(_SAMPLE.findall(block.text)):
                assert self._captions[ROOT / sample] in self._printed, f"{block}: {self._printed}"
            return
        self._printed = ""
        for script, serves in _scripts(text):
            if serves:
                self._serve(block, script)
            else:
                self._printed += self._finish(block, ["bash", "-euo", "pipefail", "-c", script])

    def compare(self, block: Block) -> None:
        """Hold what the last block has printed to a block of JSON: the same but for numbers."""
        said, printed = json.loads(block.text), json.loads(self._printed)
        assert _without_numbers(said) == _without_numbers(printed), block

    def _finish(self, block: Block, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {command[-1]}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, block: Block, script: str) -> None:
        self._end_server(must_end_well=True)
        self._is_made = " snapcap " not in f" {script} "
        log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - stays open while the server runs
        self._server = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self._folder,
            env=self._environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        end = time.monotonic() + 120
        while not self._is_ready():
            if self._server.poll() is not None or time.monotonic() > end:
                self._server.kill()
                self._server = None
                log.seek(0)
                raise AssertionError(f"{block}: {script} does not serve: {log.read().decode(errors='replace')}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=10) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _end_server(self, must_end_well: bool) -> None:
        server, self._server = self._server, None
        if server is None or (server.poll() is not None and not must_end_well):
            return
        assert server.poll() is None, f"the server of the page has ended with {server.returncode}"
        os.kill(children(server.pid)[0] if self._is_made else server.pid, signal.SIGTERM)
        try:
            status = server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            raise
        assert status == 0 or not must_end_well, f"the server of the page has ended with {status}"


def require_commands(*names: str) -> str | None:
    """Why the commands of a page cannot be run here, if they cannot."""
    missing = [name.upper() for name in names if shutil.which(name) is None]
    return f"NOT INSTALLED: {', '.join(missing)}" if missing else None


def _scripts(text: str) -> list[tuple[str, bool]]:
    """The lines of a block as they are run: those between servers together, and whether it is a server."""
    scripts: list[tuple[str, bool]] = []
    for line in text.splitlines():
        serves = _SERVER.match(line) is not None
        if scripts and not serves and not scripts[-1][1]:
            scripts[-1] = (f"{scripts[-1][0]}\n{line}", False)
        else:
            scripts.append((line, serves))
    return scripts


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_numbers(each) for each in value]
    return type(value).__name__ if isinstance(value, int | float) and not isinstance(value, bool) else value
