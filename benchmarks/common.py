"""What the measurements share: samples, servers as processes with a clock from their spawn, and report tables."""

import contextlib
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.http_probe import Connection, Reply

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
SAMPLES = DEMO / "samples"
SNAPCAP = (sys.executable, "-m", "service.cli")
PEER = (sys.executable, "-m", "benchmarks.peers.transformers_server")
VERSIONS = ("torch", "transformers", "fastapi", "uvicorn")


@dataclass(frozen=True)
class Endpoint:
    """How a server is asked: the path of a caption, and of readiness where it has one."""

    caption: str
    ready: str | None


SNAPCAP_API = Endpoint("/v1/caption", "/readyz")
PEER_API = Endpoint("/caption", None)


def samples() -> dict[str, tuple[bytes, str]]:
    """The shipped sample images with the caption each must get."""
    captions: dict[str, str] = json.loads((SAMPLES / "captions.json").read_text())
    return {name: ((SAMPLES / name).read_bytes(), caption) for name, caption in sorted(captions.items())}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without snapcap's own variables, which would change what is measured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SNAPCAP_")}
    return {**kept, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **extra}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A server process; seconds are counted from just before it was spawned."""

    def __init__(self, command: Sequence[str], api: Endpoint, extra: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.api = api
        self._log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by stop
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            cwd=ROOT,
            env=environment(**(extra or {})),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def connect(self) -> Connection:
        """A connection as soon as the port is bound."""
        while True:
            try:
                return Connection(self.port)
            except ConnectionRefusedError:
                self._check()
                time.sleep(0.002)

    def wait_ready(self, connection: Connection) -> None:
        """Until readiness answers 200; a server without such a path is ready when its port is bound."""
        while self.api.ready is not None and connection.request(self.api.ready).status != 200:
            self._check()
            time.sleep(0.005)

    def caption(self, connection: Connection, image: bytes) -> Reply:
        reply = connection.request(self.api.caption, image)
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.body.decode()}\n{self.log()}")
        return reply

    def get(self, path: str) -> Reply:
        connection = self.connect()
        try:
            return connection.request(path)
        finally:
            connection.close()

    def log(self) -> str:
        """What it has written so far."""
        with open(f"/proc/self/fd/{self._log.fileno()}") as log:
            return log.read()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not go."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with status {self._process.returncode}:\n{self.log()}")


@contextlib.contextmanager
def serving(
    command: Sequence[str], api: Endpoint = SNAPCAP_API, extra: Mapping[str, str] | None = None
) -> Iterator[Server]:
    server = Server(command, api, extra)
    try:
        yield server
    finally:
        server.stop()


def serve_command(*options: str) -> tuple[str, ...]:
    return (*SNAPCAP, "serve", "--host", "127.0.0.1", *options)


def build_store(cache: Path, *options: str, extra: Mapping[str, str] | None = None) -> None:
    """`snapcap build` into the store of a cache folder; nothing to do when it is there."""
    subprocess.run(
        [*SNAPCAP, "build", "--cache-dir", str(cache), *options],
        cwd=ROOT,
        env=environment(**(extra or {})),
        check=True,
    )


@contextlib.contextmanager
def scratch(given: Path | None) -> Iterator[Path]:
    """The folder that was given, or a temporary one."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="snapcap-bench-") as name:
        yield Path(name)


def interleave(runs: int, cases: Mapping[str, Callable[[], Mapping[str, float]]]) -> dict[str, "Samples"]:
    """Every case once, then every case again: what disturbs the machine disturbs all of them alike."""
    results = {name: Samples() for name in cases}
    with Console(stderr=True).status("") as status:
        for run in range(runs):
            for name, measure in cases.items():
                status.update(f"run {run + 1} of {runs}: {name}")
                results[name].add(measure())
    return results


@dataclass
class Samples:
    """The values of a case by what was measured."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, measured: Mapping[str, float]) -> None:
        for name, value in measured.items():
            self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        values = self.values.get(name)
        return statistics.median(values) if values else None

    def need(self, name: str) -> float:
        """The median of what must have been measured."""
        return statistics.median(self.values[name])


@dataclass
class Report:
    """Tables for the terminal and for `--json`."""

    tables: list[dict[str, Any]] = field(default_factory=list)

    def add(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        self.tables.append(
            {"title": title, "columns": list(columns), "rows": [list(row) for row in rows], "note": note}
        )

    def write(self, file: Path | None, raw: Mapping[str, Any]) -> None:
        """Print everything, and keep it with the raw samples where a file is named."""
        about = setting()
        # Not narrower than the tables where the output is no terminal, such as a file.
        console = Console(width=None if sys.stdout.isatty() else 118)
        for table in self.tables:
            shown = Table(title=table["title"], title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            for index, column in enumerate(table["columns"]):
                bars = "█" in "".join(row[index] for row in table["rows"])
                shown.add_column(column, justify="right" if index and not bars else "left", no_wrap=index == 0)
            for row in table["rows"]:
                shown.add_row(*row)
            console.print(shown)
            if table["note"]:
                console.print(table["note"], highlight=False, style="dim")
                console.print()
        console.print(f"{about['machine']}; {about['versions']}; {about['date']}", highlight=False)
        console.print(f"$ {about['command']}", highlight=False)
        if file is not None:
            file.write_text(json.dumps({**about, "tables": self.tables, **raw}, indent=2) + "\n")


def setting() -> dict[str, str]:
    """Where and how this was measured."""
    module = sys.modules["__main__"].__spec__
    name = module.name if module is not None else Path(sys.argv[0]).stem
    return {
        "machine": f"{cpu_model()}, {len(os.sched_getaffinity(0))} CPUs, {platform.system()} {platform.release()}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in VERSIONS)]
        ),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", name, *sys.argv[1:]]),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f"{value / base:.2f} ×"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
