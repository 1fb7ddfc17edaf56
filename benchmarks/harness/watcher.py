"""Watches a server from a process of its own: latencies of /livez on fresh connections, and memory.

    python -m snapcap.benchmarks.harness.watcher --port 8000 [--pid 4242] [--interval 0.01]

Writes one JSON line for each observation, `[kind, began, value]`, until its standard input ends. `began` is
CLOCK_MONOTONIC, which all processes share. There are five kinds:

- `livez`: seconds until the whole reply.
- `failed`: seconds of a probe without a reply of status 200.
- `control`: seconds until the whole reply of a server that does nothing, in a third process, which is the latency
  that the machine alone adds at that moment.
- `stretch`: how many times longer than its CPU time a little work took, in a fourth process, which is the inverse
  of the share of a CPU that the machine gives.
- `memory`: bytes of the process and all its descendants.

The watcher is a separate process, because the interpreter lock of the measuring process would be part of each
latency.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.processes import tree_memory

MEMORY_S = 0.2
WORK_S, REST_S = 0.02, 0.4
TIMEOUT_S = 300.0
_REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Output:
    """Writes lines to standard output, each in one piece, from the event loop and from a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, kind: str, began: float, value: float) -> None:
        line = json.dumps([kind, round(began, 6), round(value, 6)]).encode() + b"\n"
        with self._lock:
            os.write(1, line)


async def get(port: int) -> bool:
    """Returns whether /livez answers 200, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_REQUEST)
        reply = await reader.read()
    finally:
        writer.close()
    return reply.startswith(b"HTTP/1.1 200 ")


async def probe(port: int, kind: str, interval: float, output: Output) -> None:
    """Probes again and again, ``interval`` seconds apart. A probe is one observation, however long it waits."""
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answered = await get(port)
        except (OSError, TimeoutError):
            answered = False
        output.tell(kind if answered else "failed", began, time.monotonic() - began)
        await asyncio.sleep(interval)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(_REPLY)
    await writer.drain()
    writer.close()


async def control(listener: socket.socket) -> None:
    server = await asyncio.start_server(answer, sock=listener)
    await server.serve_forever()


def fork_control() -> tuple[int, int]:
    """Forks a server that does nothing. Returns its process id and port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    child = os.fork()
    if child == 0:
        asyncio.run(control(listener))
    listener.close()
    return child, port


def fork_work(output: Output) -> int:
    """Forks a process that works a little now and then. Returns its process id."""
    child = os.fork()
    if child:
        return child
    while True:
        began, worked = time.monotonic(), time.process_time()
        while time.process_time() - worked < WORK_S:
            pass
        output.tell("stretch", began, (time.monotonic() - began) / WORK_S)
        time.sleep(REST_S)


def sample_memory(pid: int, output: Output) -> None:
    while True:
        output.tell("memory", time.monotonic(), tree_memory(pid))
        time.sleep(MEMORY_S)


async def watch(port: int, control_port: int, interval: float, output: Output) -> None:
    ports = {"livez": port, "control": control_port}
    tasks = [asyncio.create_task(probe(each, kind, interval, output)) for kind, each in ports.items()]
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--pid", type=int, help="process id of the server's first process; without it only probes are written"
    )
    parser.add_argument("--interval", type=float, default=0.01, help="seconds between two probes")
    options = parser.parse_args()
    output = Output()
    child, control_port = fork_control()
    children = [child, *([] if options.pid is None else [fork_work(output)])]
    try:
        if options.pid is not None:
            threading.Thread(target=sample_memory, args=(options.pid, output), daemon=True).start()
        asyncio.run(watch(options.port, control_port, options.interval, output))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
