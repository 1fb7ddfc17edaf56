"""Runs `snapcap serve` with faults that a file switches on.

    python -m support.servers.faulty_server FOLDER serve …

A fault is on while FOLDER has a file of its name. `FaultyServer` starts one, and `switch` makes the file.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from support.servers.server_process import ServerProcess

TESTS = Path(__file__).parents[2]

# In the device thread, before its next step: it sleeps, keeps Python's lock, has a kernel assert, is out of memory.
HANG, HANG_LOCKED, ASSERT, NO_MEMORY = "hang", "hang-locked", "assert", "no-memory"
# Faults in the event loop, which sleeps, or keeps Python's lock.
BLOCK, BLOCK_LOCKED = "block", "block-locked"
# With COLD, a single bucket is warm before READY. The other buckets are warmed once WARM exists, and fail if
# COLD_FAILS exists.
COLD, WARM, COLD_FAILS = "cold", "warm", "cold-fails"


class FaultyServer(ServerProcess):
    """A server whose faults are switched in a folder."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        super().__init__(*arguments, PYTHONPATH=path, **environment)
        self._faults = folder / "faults"
        self._faults.mkdir()
        self.program = ("-m", "support.servers.faulty_server", str(self._faults))

    def switch(self, fault: str, on: bool = True) -> None:
        if on:
            (self._faults / fault).touch()
        else:
            (self._faults / fault).unlink()

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """On within the block."""
        self.switch(name)
        yield
        self.switch(name, on=False)


def keep_the_lock() -> None:
    """For longer than any test: an expression that tries all ways to cut a text, within one call of native code."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def before_step(on: Callable[[str], bool], device: str) -> None:
    """``device``: cpu or cuda. A server that runs without torch's module gets it with its first fault."""
    if on(HANG):
        time.sleep(3600)
    if on(HANG_LOCKED):
        keep_the_lock()
    if on(ASSERT):
        import torch

        torch.zeros(1, device=device)[torch.tensor([5], device=device)]
    if on(NO_MEMORY):
        import torch

        if device == "cpu":
            raise torch.OutOfMemoryError("out of memory")
        torch.empty(1 << 50, dtype=torch.uint8, device=device)


def patch_engine(on: Callable[[str], bool]) -> None:
    """In the engine process, before its start."""
    import snapcap.service.readiness
    import snapcap.service.server.engine_process
    import snapcap.warmup.start.start

    process: Any = snapcap.service.server.engine_process._EngineProcess
    ready = process._ready

    def faulty_ready(self: Any, loaded: Any, *others: Any) -> None:
        runner, warmer = loaded.runner, loaded.warmer
        step, warm = runner.decode_step, warmer.warm_aside

        def decode_step(*arguments: Any) -> Any:
            before_step(on, runner.state.memory.kind)
            return step(*arguments)

        def warm_aside(bucket: Any, backend: Any) -> None:
            if on(COLD_FAILS):
                raise RuntimeError("no kernel image is available")
            warm(bucket, backend)

        runner.decode_step = decode_step
        object.__setattr__(warmer, "warm_aside", warm_aside)
        ready(self, loaded, *others)

    process._ready = faulty_ready
    if on(COLD):
        readiness: Any = snapcap.service.readiness
        after_ready = readiness.after_ready

        def wait_and(work: Callable[[], object]) -> None:
            while not on(WARM):
                time.sleep(0.02)
            work()

        startup: Any = snapcap.warmup.start.start
        readiness.after_ready = lambda work: after_ready(partial(wait_and, work))
        startup.before_ready = lambda backend, plan, options: plan.table.buckets[:1]


def patch_http(on: Callable[[str], bool]) -> None:
    """In the HTTP process, once it has imported what serves."""
    import snapcap.service.server.http_process

    tick = snapcap.service.server.http_process.Server.on_tick

    async def on_tick(self: Any, counter: int) -> bool:
        if on(BLOCK):
            time.sleep(3600)  # noqa: ASYNC251  blocking is the fault
        if on(BLOCK_LOCKED):
            keep_the_lock()
        return await tick(self, counter)

    server: Any = snapcap.service.server.http_process.Server
    server.on_tick = on_tick


def main(folder: Path, arguments: list[str]) -> int:
    import snapcap.service.server.engine_process
    import snapcap.service.server.serve
    from snapcap.service.cli.main import main as command

    engine_process: Any = snapcap.service.server.engine_process
    server: Any = snapcap.service.server.serve
    serve_engine, load_start = engine_process.serve_engine, server._load_start

    def on(fault: str) -> bool:
        return os.path.exists(folder / fault)

    def serve(*given: Any) -> int:
        patch_engine(on)
        return serve_engine(*given)

    def loaded(*given: Any) -> Any:
        patch_http(on)
        return load_start(*given)

    engine_process.serve_engine, server._load_start = serve, loaded
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
