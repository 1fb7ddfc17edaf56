"""Runs measured processes and servers, with a clock that starts just before they are spawned.

An S3 server on loopback is one of them, which has signed artifacts.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from snapcap.benchmarks.harness.marks import RESULT, Marks
from snapcap.benchmarks.harness.workload import ROOT, build_store, environment, free_port, run_module

BINARY = "application/octet-stream"
START_LIMIT_S = 600.0


class Reply(NamedTuple):
    """A reply. ``fields`` of an `AsyncConnection`: the head's fields by their names in lower case."""

    status: int
    body: bytes
    fields: Mapping[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


def ask(connection: HTTPConnection, path: str, body: bytes | None = None, content_type: str = BINARY) -> Reply:
    """Sends a GET, or a POST if there is a body, and waits for the reply. Raises `OSError` if the connection is
    lost."""
    connection.request("GET" if body is None else "POST", path, body, {"Content-Type": content_type})
    reply = connection.getresponse()
    return Reply(reply.status, reply.read(), {})


@dataclass(frozen=True)
class AsyncConnection:
    """A keep-alive connection to a port of this machine, for an event loop, with one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int) -> "AsyncConnection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: bytes) -> Reply:
        """Sends a whole request and returns its reply, which must have its length.

        Raises:
            OSError: the connection was lost before the reply was whole.
        """
        self.writer.write(request)
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = (line.partition(":") for line in head[1:])
            fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
            body = await self.reader.readexactly(int(fields.get("content-length", "0")))
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the reply was cut") from error
        return Reply(int(head[0].split()[1]), body, fields)

    def close(self) -> None:
        self.writer.close()


def request_bytes(path: str, body: bytes | None = None, content_type: str = BINARY) -> bytes:
    """Returns the bytes of a GET, or of a POST if there is a body."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    return f"{head}Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(frozen=True)
class Endpoint:
    """The paths of a server for captions, and for readiness if it has one.

    takes_json: the server takes an image as base64 in a JSON document, and not as the body.
    """

    caption: str
    ready: str | None
    takes_json: bool = False

    def body(self, image: bytes) -> tuple[bytes, str]:
        """Returns the body and the content type of a request for a caption."""
        if not self.takes_json:
            return image, BINARY
        return json.dumps({"image": base64.b64encode(image).decode()}).encode(), "application/json"


SNAPCAP_API = Endpoint("/v1/caption", "/readyz")


def spawn(
    command: Sequence[str], log: IO[Any], extra: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts a process that leads a process group of its own and writes to a file."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**(extra or {})),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class Process:
    """A child whose output goes to a file. Seconds are counted from just before its spawn."""

    def __init__(self, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        self._log: TextIO = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by close
        self.spawned = time.monotonic()
        self._process = spawn(command, self._log, extra)

    @property
    def pid(self) -> int:
        return self._process.pid

    def seconds(self) -> float:
        return time.monotonic() - self.spawned

    def log(self) -> str:
        """Returns the output so far."""
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text(errors="replace")

    def wait(self, limit: float) -> None:
        """Waits until the process has ended successfully.

        Raises:
            RuntimeError: it failed, or did not end within ``limit`` seconds.
        """
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {limit:.0f} s: {self.last_line()}") from None
        if self._process.returncode:
            raise RuntimeError(f"ended with status {self._process.returncode}: {self.last_line()}")

    def check(self) -> None:
        """Checks that the process runs, and is not far too late.

        Raises:
            RuntimeError: it has ended, or takes longer than ``START_LIMIT_S``.
        """
        if self._process.poll() is not None:
            raise RuntimeError(f"ended with status {self._process.returncode}: {self.last_line()}\n{self.log()}")
        if self.seconds() > START_LIMIT_S:
            raise RuntimeError(f"the server was not ready after {START_LIMIT_S:.0f} s: {self.last_line()}")

    def last_line(self) -> str:
        """Returns the last line of output, which for a traceback is the error."""
        lines = [line for line in self.log().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it has written nothing"

    def close(self) -> None:
        """Ends the process with SIGTERM, and then its whole group with SIGKILL."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def run_measured(
    command: Sequence[str], limit: float, extra: Mapping[str, str] | None = None
) -> tuple[Marks, dict[str, Any]]:
    """Runs a program that ends by itself. Returns its marks, in seconds since its spawn, and its results.

    Raises:
        RuntimeError: it failed, printed no result, or took longer than ``limit`` seconds.
    """
    with contextlib.closing(Process(command, extra)) as process:
        process.wait(limit)
        lines = [line for line in process.log().splitlines() if line.startswith(RESULT)]
        if not lines:
            raise RuntimeError("the program printed no result")
        marks, found = json.loads(lines[0].removeprefix(RESULT))
        return [(name, moment - process.spawned) for name, moment in marks], found


class Server(Process):
    """A server process on a free port."""

    def __init__(
        self, command: Sequence[str], api: Endpoint = SNAPCAP_API, extra: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.api = api
        super().__init__([*command, "--port", str(self.port)], extra)

    def connect(self) -> HTTPConnection:
        """Returns a keep-alive connection as soon as the port is bound."""
        while True:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=START_LIMIT_S)
            try:
                connection.connect()
            except ConnectionRefusedError:
                self.check()
                time.sleep(0.002)
            else:
                return connection

    def wait_ready(self, connection: HTTPConnection) -> None:
        """Waits until readiness answers 200. A server without such a path is ready once its port is bound."""
        while self.api.ready is not None and ask(connection, self.api.ready).status != 200:
            self.check()
            time.sleep(0.005)

    def caption(self, connection: HTTPConnection, image: bytes) -> Reply:
        reply = ask(connection, self.api.caption, *self.api.body(image))
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.body.decode()}\n{self.log()}")
        return reply

    def compiles(self) -> dict[str, float]:
        """Returns the number of compiled graphs since READY, by its name. Empty for a peer."""
        if self.api is not SNAPCAP_API:
            return {}
        connection = self.connect()
        metrics = ask(connection, "/metrics").body.decode()
        connection.close()
        found = re.search(r'^snapcap_compile_events_total{when="serving"} (\S+)$', metrics, re.MULTILINE)
        return {"compiles_serving": float(found[1]) if found else 0.0}


CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHAREDCREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1,localhost",
}
_BUCKET = "bench"


@contextlib.contextmanager
def s3_artifacts(
    cache: Path, folder: Path, options: tuple[str, ...] = (), checkpoint: Path | None = None
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Publishes and signs the artifact set that `cache` holds. Keys go to `folder`. Yields the port of the S3
    server and the options with which a server finds the set, whose environment has ``CREDENTIALS``.

    `options` name the model. With a `checkpoint`, they lack the model's name: the checkpoint is uploaded to S3,
    and published with its weights.
    """
    import boto3

    key = folder / "bench.key"
    # S3 is another process too. A server inside the measuring process would share its interpreter lock.
    command = (sys.executable, "-m", "moto.server")
    with contextlib.closing(Server(command, Endpoint("/", None), CREDENTIALS)) as moto:
        moto.connect().close()
        endpoint = f"http://127.0.0.1:{moto.port}"
        s3 = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        s3.create_bucket(Bucket=_BUCKET)
        if not key.exists():
            run_module("snapcap", "keygen", str(key))
        store = ("--store", f"s3://{_BUCKET}/snapcap", "--s3-endpoint-url", endpoint)
        trusted: tuple[str, ...] = ("--trusted-key", f"{key}.pub")
        signing: tuple[str, ...] = ("--sign-key", str(key))
        if checkpoint is not None:
            for path in (*checkpoint.glob("*.json"), *checkpoint.glob("*.safetensors")):
                s3.upload_file(str(path), _BUCKET, f"model/{path.name}")
            trusted += ("--model", f"s3://{_BUCKET}/model")
            signing += ("--weights",)
        build_store(cache, *options, *store, *signing, *trusted, extra=CREDENTIALS)
        yield moto.port, (*store, *trusted)
