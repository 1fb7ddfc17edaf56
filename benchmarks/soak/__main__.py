"""Runs a campaign of faults: two servers, good and bad traffic, and counts of lost requests.

    python -m snapcap.benchmarks.soak --minutes 30 [--seed N] [--faults all] [--device cpu] [--cache FOLDER]
        [--models N] [--json FILE]

Each fault is injected once, and then faults come at random. Faults that cannot be injected here are named, with
the reason. Good clients retry as the API tells them to, and each caption is compared with the known one. A server
that ends is started again. A server whose /livez does not answer is ended, as in Kubernetes. With --models each
server has several models, which wake and leave; --models 5 --serve "--host-memory 240MiB" makes them take turns:
one that starts with torch then fits alone. The exit status is 1 if a request was lost, a caption was wrong, or a
server answered 500 or did not recover. Traffic goes to 127.0.0.1 only.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from snapcap.benchmarks.harness.arguments import add_files, add_serve, count, make_parser, some_of
from snapcap.benchmarks.harness.processes import descendants, is_gone, own_parts
from snapcap.benchmarks.harness.report import Report
from snapcap.benchmarks.harness.server import CREDENTIALS, request_bytes, s3_artifacts
from snapcap.benchmarks.harness.workload import samples, scratch, serve_command
from snapcap.benchmarks.soak.clients import BadClients, GoodClients, captions_rightly, leave, requests
from snapcap.benchmarks.soak.servers import Lie, LyingProxy, Replica, ask

NAMES = ("one", "two")
# Time limits are short enough for a campaign to wait for. There are two decode processes, to be stopped and
# killed.
OPTIONS = (
    *("--decode-processes", "2", "--queue-size", "32", "--request-timeout", "10"),
    *("--drain-delay", "1", "--grace-period", "10", "--body-timeout", "5", "--watchdog-timeout", "5"),
    *("--store-deadline", "8", "--s3-connect-timeout", "1", "--s3-read-timeout", "2", "--s3-deadline", "8"),
)
RECOVERY_LIMIT_S = 180.0
START_LIMIT_S = 300.0
QUIET_S = 2.0  # between two faults
CACHE_BYTES = 512 << 20
ENGINE, DECODE_PARENT, FIRST_DECODE = 0, 1, 2  # indexes of `own_parts`
Healed = Callable[[], bool]
STALL_S = 5.0
FLOOD = 400


Injection = Callable[["Campaign", Replica], AbstractAsyncContextManager[Healed]]


@dataclass(frozen=True)
class Fault:
    """A fault.

    kind: the requirement of the fault, by which a campaign leaves it out where it cannot be injected.
    inject: injects the fault into one server, yields a function that tells whether the broken part has recovered,
        and removes the fault.
    """

    name: str
    kind: str
    inject: Injection


class Campaign:
    """Injects faults one after the other, and measures the recovery from each.

    strikes: the faults so far. ``at`` is seconds since the campaign's beginning. ``recovered`` is seconds until the
        server was ready, captioned rightly, and had recovered the broken part, or None if it took longer than the
        limit.
    """

    def __init__(self, replicas: Sequence[Replica], proxy: LyingProxy, bad: BadClients, chooser: Random) -> None:
        self.strikes: list[dict[str, Any]] = []
        self.replicas = replicas
        self.proxy = proxy
        self.bad = bad
        self.chooser = chooser
        self._console = Console(stderr=True, highlight=False)
        self._request = requests()[0]
        self._began = time.monotonic()

    async def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Injects each fault once, however long that takes, and then faults at random until the time is over."""
        chooser, end = self.chooser, time.monotonic() + seconds
        turns = chooser.sample(faults, len(faults))
        while turns or time.monotonic() < end:
            await asyncio.sleep(QUIET_S)
            await self.all_well()  # only one fault at a time: with both servers down, no retry can succeed
            if turns or faults:
                await self._strike(turns.pop() if turns else chooser.choice(faults))

    async def all_well(self) -> bool:
        """Returns whether every server is ready and captions rightly, within a time limit."""
        recoveries = (self._recovery(each, lambda: True, START_LIMIT_S) for each in self.replicas)
        return None not in await asyncio.gather(*recoveries)

    async def _strike(self, fault: Fault) -> None:
        replica = self.chooser.choice(self.replicas)
        at, problem = time.monotonic() - self._began, ""
        recovered: float | None = None
        try:
            async with fault.inject(self, replica) as healed:
                recovered = await self._recovery(replica, healed, RECOVERY_LIMIT_S)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if recovered is None:
            # The campaign goes on. Killing the container also removes the rest of the fault.
            replica.kill()
            await self._recovery(replica, lambda: True, RECOVERY_LIMIT_S)
        for each in self.replicas:
            each.sample_memory()
        strike = {
            "fault": fault.name,
            "replica": replica.name,
            "at": at,
            "recovered": recovered,
            "problem": problem,
        }
        self.strikes.append(strike)
        told = "NOT RECOVERED" if recovered is None else f"{recovered:.1f} s"
        self._console.print(f"{at:6.0f} s  {fault.name} on {replica.name}: {told} {problem}")

    async def _recovery(self, replica: Replica, healed: Healed, limit: float) -> float | None:
        """Returns the seconds until a server has recovered the broken part, is ready and captions rightly. None
        after ``limit``."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            ready = healed() and (await ask(replica.port, request_bytes("/readyz"), 2.0)).status == 200
            if ready and await captions_rightly(replica.port, self._request):
                return time.monotonic() - began
            await asyncio.sleep(0.1)
        return None


def signalled(number: int, part: int | None) -> Injection:
    """Returns a fault that sends a signal to a part of the server, or to the process that answers if ``part`` is
    None.

    A stopped process is never continued. The server has recovered when this process is gone, and there are as many
    parts as before.
    """

    @asynccontextmanager
    async def inject(_: Campaign, replica: Replica) -> AsyncIterator[Healed]:
        before = own_parts(replica.pid)
        pid = replica.pid if part is None else before[part]
        os.kill(pid, number)

        def healed() -> bool:
            try:
                return is_gone(pid) and len(own_parts(replica.pid)) >= (len(before) if part != DECODE_PARENT else 1)
            except RuntimeError:
                return False

        yield healed

    return inject


@asynccontextmanager
async def drained(_: Campaign, replica: Replica) -> AsyncIterator[Healed]:
    """Drains the server, as a rolling update does."""
    start = replica.starts
    replica.signal(signal.SIGTERM)
    yield lambda: replica.starts > start


@asynccontextmanager
async def model_killed(campaign: Campaign, replica: Replica) -> AsyncIterator[Healed]:
    """Kills a process of a model that wakes, is ready or leaves, or an engine process in reserve."""
    born = descendants(replica.pid)
    pid = campaign.chooser.choice(born) if born else 0
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    yield lambda: not pid or is_gone(pid)


def store_that(lie: Lie) -> Injection:
    """Returns a fault that starts a server without a cache, while the store's proxy applies ``lie``."""

    @asynccontextmanager
    async def inject(campaign: Campaign, replica: Replica) -> AsyncIterator[Healed]:
        campaign.proxy.lie = lie
        try:
            replica.empty_cache()
            async with drained(campaign, replica) as healed:
                yield healed
        finally:
            campaign.proxy.lie = Lie.NONE

    return inject


@asynccontextmanager
async def disk_full(campaign: Campaign, replica: Replica) -> AsyncIterator[Healed]:
    """Starts a server with an empty cache folder, on a disk without a free byte."""
    filler = replica.cache / "filler"
    replica.empty_cache()
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * (1 << 16)):
                pass
        async with drained(campaign, replica) as healed:
            yield healed
    finally:
        filler.unlink(missing_ok=True)


@asynccontextmanager
async def disk_read_only(campaign: Campaign, replica: Replica) -> AsyncIterator[Healed]:
    """Starts a server with a read-only cache folder, like a volume whose file system has an error."""
    remount = partial(subprocess.run, check=True, capture_output=True)
    command = ["mount", str(replica.cache), "-o"]
    await asyncio.to_thread(remount, [*command, "remount,ro"])
    try:
        async with drained(campaign, replica) as healed:
            yield healed
    finally:
        await asyncio.to_thread(remount, [*command, "remount,rw"])


def good_request() -> bytes:
    return request_bytes("/v1/caption", next(iter(samples().values()))[0], "image/png")


def left(count: int, *, whole: bool) -> Injection:
    """Returns a fault in which many clients send a request and leave before the reply. They send half a body unless
    ``whole``, and then stay for a while."""

    @asynccontextmanager
    async def inject(_: Campaign, replica: Replica) -> AsyncIterator[Healed]:
        sent = good_request() if whole else good_request()[:-100]
        stays = (turn % 10 / 100 if whole else STALL_S for turn in range(count))
        leaving = asyncio.gather(*(leave(replica.port, sent, stay) for stay in stays))
        yield lambda: True
        await leaving

    return inject


@asynccontextmanager
async def flooded(campaign: Campaign, replica: Replica) -> AsyncIterator[Healed]:
    """Sends many times more good requests than the queue holds."""
    asking = asyncio.gather(*(ask(replica.port, good_request(), 60.0) for _ in range(FLOOD)))
    yield asking.done
    campaign.bad.answered.update(reply.status for reply in await asking)


FAULTS = (
    Fault("engine-stopped", "parts", signalled(signal.SIGSTOP, ENGINE)),
    Fault("engine-killed", "parts", signalled(signal.SIGKILL, ENGINE)),
    Fault("decode-stopped", "parts", signalled(signal.SIGSTOP, FIRST_DECODE)),
    Fault("decode-killed", "parts", signalled(signal.SIGKILL, FIRST_DECODE)),
    Fault("decode-parent-killed", "parts", signalled(signal.SIGKILL, DECODE_PARENT)),
    Fault("server-stopped", "processes", signalled(signal.SIGSTOP, None)),
    Fault("server-killed", "processes", signalled(signal.SIGKILL, None)),
    Fault("drained", "processes", drained),
    Fault("model-killed", "models", model_killed),
    Fault("s3-black-hole", "s3", store_that(Lie.SILENCE)),
    Fault("s3-slow", "s3", store_that(Lie.DELAY)),
    Fault("s3-truncates", "s3", store_that(Lie.CUT)),
    Fault("s3-corrupts", "s3", store_that(Lie.CORRUPTION)),
    Fault("disk-full", "disk", disk_full),
    Fault("disk-read-only", "disk", disk_read_only),
    Fault("clients-stall", "clients", left(200, whole=False)),
    Fault("clients-leave", "clients", left(300, whole=True)),
    Fault("clients-flood", "clients", flooded),
)


def went_well(totals: dict[str, Any]) -> bool:
    """Returns whether no request was lost, no caption wrong, no server answered 500, and every server recovered."""
    failed = totals["lost"] or totals["wrong"] or totals["not_recovered"] or not totals["ended_well"]
    return not failed and "500" not in totals["bad_requests_by_status"]


def write_report(
    file: Path | None, strikes: list[dict[str, Any]], totals: dict[str, Any], skipped: dict[str, str]
) -> None:
    """Prints the tables. Also writes the results if a file is given."""
    report = Report()
    rows = []
    for each in strikes:
        recovered = "NEVER" if each["recovered"] is None else f"{each['recovered']:.1f}"
        rows.append((each["fault"], each["replica"], f"{each['at']:.0f}", recovered))
    note = "recovered: until the server was ready, captioned rightly, and had what was broken."
    report.add(
        "Faults, in the order in which they were injected", ["fault", "server", "at s", "recovered s"], rows, note
    )
    report.add("Not injected", ["fault", "why"], [*skipped.items()])
    report.add("The whole campaign", ["", "value"], [(name, str(value)) for name, value in totals.items()])
    figures = {name: value for name, value in totals.items() if isinstance(value, int | float)}
    report.write(file, figures, strikes=strikes, totals=totals, skipped=skipped)


def mounted(folder: Path, exits: contextlib.ExitStack) -> str:
    """Puts a folder on a small file system until the exit. Returns why that failed, or an empty text."""
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        return "this needs root and mount"
    command = ["mount", "-t", "tmpfs", "-o", f"size={CACHE_BYTES}", "snapcap-soak", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip()
    exits.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
    return ""


async def run(
    options: argparse.Namespace, folder: Path, store: tuple[int, Sequence[str]] | None, faults: Sequence[Fault]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs the campaign. ``store`` is the port of a store and its options. Returns the strikes and the totals."""
    chooser = Random(options.seed)
    proxy = LyingProxy(store[0] if store else 0, chooser)
    await proxy.start()
    command = [*serve_command("--device", options.device, "--build", "off"), *OPTIONS]
    if store:
        command += [*store[1], "--s3-endpoint-url", f"http://127.0.0.1:{proxy.port}"]
    else:
        command += ["--backend", "eager"]
    models = ["demo", *(f"demo-{number}" for number in range(2, options.models + 1))]
    if options.models > 1:
        command += ["--idle-unload", "1", *(word for name in models for word in ("--model", f"{name}=demo"))]
    command += shlex.split(options.serve)
    replicas = [Replica(name, command, CREDENTIALS, folder / name) for name in NAMES]
    bad, clients = BadClients(replicas, chooser), GoodClients(replicas, chooser, models)
    campaign = Campaign(replicas, proxy, bad, chooser)
    try:
        for replica in replicas:
            replica.start()
        if not await campaign.all_well():
            raise RuntimeError(f"the servers do not start:\n{replicas[0].log.read_text(errors='replace')[-2000:]}")
        began, over = time.monotonic(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(options.clients):
                group.create_task(clients.run(over))
            for _ in range(2):
                group.create_task(bad.run(over))
            await campaign.run(faults, options.minutes * 60)
            over.set()
        ended_well, seconds = await campaign.all_well(), time.monotonic() - began
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))
        proxy.stop()
    return campaign.strikes, {
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "faults": len(campaign.strikes),
        **vars(clients.tally),
        "bad_requests_by_status": {str(status): count for status, count in sorted(bad.answered.items())},
        "server_starts": {each.name: each.starts for each in replicas},
        "exit_statuses": {each.name: each.exits for each in replicas},
        "memory_mib": {each.name: each.memory_mib for each in replicas},
        "not_recovered": [each["fault"] for each in campaign.strikes if each["recovered"] is None],
        "ended_well": ended_well,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    text = "seed of everything random (default: a random seed, which is printed)"
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help=text)
    names = some_of(fault.name for fault in FAULTS)
    text = "all, or a comma-separated list (default: %(default)s)"
    parser.add_argument("--faults", type=names, default="all", help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clients", type=count, default=6, help="number of good clients")
    text = "number of models of each server, which are all the demo model (default: %(default)s)"
    parser.add_argument("--models", type=count, default=1, help=text)
    add_files(parser)
    add_serve(parser)
    options = parser.parse_args()
    # Raises SystemExit, so that servers are stopped and mounts removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [fault for fault in FAULTS if fault.name in options.faults]
    with scratch() as folder, contextlib.ExitStack() as exits:
        unavailable = {"models": "this needs --models"}
        if options.models > 1:
            unavailable = {"parts": "a server of several models forks none of their processes"}
        if any(fault.kind == "disk" for fault in chosen):
            reasons = [mounted(folder / name, exits) for name in NAMES]
            unavailable |= {"disk": f"no small file system: {max(reasons)}"} if any(reasons) else {}
        skipped = {each.name: unavailable[each.kind] for each in chosen if each.kind in unavailable}
        for name, why in skipped.items():
            print(f"NOT INJECTED: {name}: {why}", file=sys.stderr)
        print(f"seed {options.seed}", file=sys.stderr)
        faults = [fault for fault in chosen if fault.name not in skipped]
        store = None
        if any(fault.kind in ("s3", "disk") for fault in faults):
            sets = (options.cache or folder).resolve() / "sets"
            store = exits.enter_context(s3_artifacts(sets, folder, ("--device", options.device)))
        strikes, totals = asyncio.run(run(options, folder, store, faults))
    write_report(options.json, strikes, totals, skipped)
    return 0 if went_well(totals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
