"""Runs a campaign of faults: two servers, good and bad traffic, and counts of lost requests.

    python -m snapcap.benchmarks.soak --minutes 30 [--seed N] [--faults all] [--device cpu] [--cache FOLDER]
        [--models N] [--json FILE]

Each fault is injected once, and then faults come at random. Faults that cannot be injected here are named, with
the reason. Good clients retry as the API tells them to, and each caption is compared with the known one. A server
that ends is started again. A server whose /livez does not answer is ended, as in Kubernetes. With --models each
server has several models, which wake and leave; --serve "--host-memory 120MiB" makes them take turns. The exit
status is 1 if a request was lost, a caption was wrong, or a server answered 500 or did not recover. Traffic goes to
127.0.0.1 only.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from snapcap.benchmarks.harness.arguments import add_files, add_serve, count, make_parser, some_of
from snapcap.benchmarks.harness.moto_store import s3_artifacts
from snapcap.benchmarks.harness.report import Report
from snapcap.benchmarks.harness.workload import SNAPCAP, build_store, scratch
from snapcap.benchmarks.soak.clients import BadClients, GoodClients, captions_rightly, requests
from snapcap.benchmarks.soak.faults import FAULTS, Fault, Healed, World
from snapcap.benchmarks.soak.servers import LyingProxy, Replica, ask, lone_request

NAMES = ("one", "two")
COUNTS = ("requests", "retried", "lost", "wrong")  # fields of `Tally` that are counted for each fault
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
SETTLE_S = 5.0
CACHE_BYTES = 512 << 20
_ENDPOINT = "--s3-endpoint-url"


@dataclass
class Setting:
    """The environment of a campaign.

    options, environment: of all servers.
    unavailable: why a kind of fault cannot be injected here.
    """

    folder: Path
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    proxy: LyingProxy | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def artifacts(self, sets: Path, chooser: Random, *options: str) -> Iterator[None]:
        """Provides the demo model's artifacts, and builds them if ``sets`` has none.

        The artifacts are on S3 behind the proxy, or in a folder if no S3 server is installed.
        """
        self.options += ["--backend", "auto", "--build", "off"]
        if importlib.util.find_spec("moto") is None:
            reason = "moto is not installed, so nothing is fetched from S3"
            self.unavailable |= dict.fromkeys(("s3", "disk"), reason)
            build_store(sets, *options)
            self.options += ["--store", str(sets / "store")]
            yield
            return
        with s3_artifacts(sets, self.folder, options) as published:
            given = list(published.options)
            self.proxy = LyingProxy(urlsplit(given[given.index(_ENDPOINT) + 1]).port or 80, chooser)
            self.options += given
            self.environment |= published.environment
            yield

    @contextlib.contextmanager
    def small_disks(self) -> Iterator[None]:
        """Puts the cache folder of each server on a file system of its own, if mounting is permitted."""
        mounted: list[Path] = []
        try:
            for name in NAMES:
                folder = self.folder / name
                folder.mkdir(parents=True, exist_ok=True)
                reason = _mount(folder)
                if reason:
                    self.unavailable["disk"] = f"a small file system cannot be mounted ({reason})"
                    break
                mounted.append(folder)
            yield
        finally:
            for folder in mounted:
                subprocess.run(["umount", "-l", str(folder)], check=False)


def _mount(folder: Path) -> str:
    """Mounts a small file system. Returns why that failed, or an empty text."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        return "this needs root and mount"
    command = ["mount", "-t", "tmpfs", "-o", f"size={CACHE_BYTES}", "snapcap-soak", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


@dataclass(frozen=True)
class Strike:
    """A fault that was injected.

    at: seconds since the campaign's beginning.
    recovered: seconds until the server was ready, captioned rightly, and had recovered the broken part. None if it
        took longer than the limit.
    peak: memory of the largest server so far, in MiB.
    """

    fault: str
    replica: str
    at: float
    recovered: float | None
    requests: int
    retried: int
    lost: int
    wrong: int
    peak: float
    problem: str = ""


class Campaign:
    """Injects faults one after the other, and measures the effects of each."""

    def __init__(self, world: World, clients: GoodClients, console: Console) -> None:
        self.strikes: list[Strike] = []
        self._world = world
        self._clients = clients
        self._console = console
        self._requests = requests()
        self._began = time.monotonic()

    async def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Injects each fault once, however long that takes, and then faults at random until the time is over."""
        chooser, end = self._world.chooser, time.monotonic() + seconds
        turns = chooser.sample(faults, len(faults))
        while turns or time.monotonic() < end:
            await asyncio.sleep(QUIET_S)
            await self.all_well()  # only one fault at a time: with both servers down, no retry can succeed
            if turns:
                await self._strike(turns.pop())
            elif faults:
                await self._strike(chooser.choice(faults))

    async def all_well(self, limit: float = START_LIMIT_S) -> bool:
        """Returns whether every server is ready and captions rightly, within ``limit`` seconds."""
        found = await asyncio.gather(*(self._recovery(each, lambda: True, limit) for each in self._world.replicas))
        return all(seconds is not None for seconds in found)

    async def _strike(self, fault: Fault) -> None:
        replica = self._world.chooser.choice(self._world.replicas)
        before, began, problem = self._clients.tally.snapshot(), time.monotonic(), ""
        recovered: float | None = None
        try:
            async with fault.inject(self._world, replica) as healed:
                recovered = await self._recovery(replica, healed, RECOVERY_LIMIT_S)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if recovered is None:
            # The campaign goes on. Killing the container also removes the rest of the fault.
            replica.kill()
            await self._recovery(replica, lambda: True, RECOVERY_LIMIT_S)
        after = self._clients.tally
        peak = max((value for each in self._world.replicas for _, value in each.memory), default=0) / (1 << 20)
        counted = {name: getattr(after, name) - getattr(before, name) for name in COUNTS}
        at = began - self._began
        strike = Strike(fault.name, replica.name, at, recovered, **counted, peak=peak, problem=problem)
        self.strikes.append(strike)
        told = "NOT RECOVERED" if recovered is None else f"{recovered:.1f} s"
        text = f"{strike.at:6.0f} s  {fault.name} on {replica.name}: {told} {problem}"
        self._console.print(text, highlight=False)

    async def _recovery(self, replica: Replica, healed: Healed, limit: float) -> float | None:
        """Returns the seconds until a server has recovered the broken part, is ready and captions rightly. None
        after ``limit``."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            ready = healed() and await replica.answers("/readyz", 2.0)
            if ready and await captions_rightly(replica.port, self._requests):
                return time.monotonic() - began
            await asyncio.sleep(0.1)
        return None


async def events_of_models(replicas: Sequence[Replica]) -> dict[str, int]:
    """Returns how often models woke, by result, and left, by reason, since the last start of each server."""
    found: Counter[str] = Counter()
    for replica in replicas:
        text = (await ask(replica.port, lone_request("/metrics"), 10.0)).body.decode()
        for event, label, value in re.findall(
            r'^snapcap_model_(\w+)_total\{.*"(\w+)"\} (\S+)$', text, re.MULTILINE
        ):
            found[f"{event} {label}"] += int(float(value))
    return dict(found)


def went_well(totals: dict[str, Any]) -> bool:
    """Returns whether no request was lost, no caption wrong, no server answered 500, and every server recovered."""
    failed = totals["lost"] or totals["wrong"] or totals["not_recovered"] or not totals["ended_well"]
    return not failed and "500" not in totals["bad_requests_by_status"]


def write_report(file: Path | None, strikes: list[Strike], totals: dict[str, Any], skipped: dict[str, str]) -> None:
    """Prints the tables. Also writes the results if a file is given."""
    report = Report()
    rows = [
        [
            *(each.fault, each.replica, f"{each.at:.0f}"),
            "NEVER" if each.recovered is None else f"{each.recovered:.1f}",
            *(str(getattr(each, name)) for name in COUNTS),
        ]
        for each in strikes
    ]
    columns = ["fault", "server", "at s", "recovered s", *COUNTS]
    note = "recovered: until the server was ready, captioned rightly, and had what was broken."
    report.add("Faults, in the order in which they were injected", columns, rows, note)
    report.add("Not injected", ["fault", "why"], [[name, why] for name, why in skipped.items()])
    report.add("The whole campaign", ["", "value"], [[name, str(value)] for name, value in totals.items()])
    figures = {name: value for name, value in totals.items() if isinstance(value, int | float)}
    report.write(file, figures, strikes=[asdict(each) for each in strikes], totals=totals, skipped=skipped)


def read_arguments() -> argparse.Namespace:
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
    return parser.parse_args()


async def run(
    options: argparse.Namespace, setting: Setting, faults: Sequence[Fault]
) -> tuple[list[Strike], dict[str, Any]]:
    """Runs the campaign. Returns its strikes and totals."""
    chooser = Random(options.seed)
    if setting.proxy is not None:
        await setting.proxy.start()
        place = setting.options.index(_ENDPOINT) + 1
        setting.options[place] = f"http://127.0.0.1:{setting.proxy.port}"
    command = [*SNAPCAP, "serve", "--host", "127.0.0.1", "--device", options.device]
    models = ["demo", *(f"demo-{number}" for number in range(2, options.models + 1))]
    if options.models > 1:
        command += ["--idle-unload", "1", *(word for name in models for word in ("--model", f"{name}=demo"))]
    command += [*OPTIONS, *setting.options, *shlex.split(options.serve)]
    replicas = [Replica(name, command, setting.environment, setting.folder / name) for name in NAMES]
    bad, clients = BadClients(replicas, chooser), GoodClients(replicas, options.clients, chooser, models)
    campaign = Campaign(World(replicas, setting.proxy, bad, chooser), clients, Console(stderr=True))
    try:
        for replica in replicas:
            replica.start()
        if not await campaign.all_well():
            raise RuntimeError(f"the servers do not start:\n{replicas[0].log()[-2000:]}")
        clients.start()
        bad.start()
        began = time.monotonic()
        await campaign.run(faults, options.minutes * 60)
        bad.stop()
        await clients.stop()
        ended_well = await campaign.all_well()
        await asyncio.sleep(SETTLE_S)
        seconds, model_events = time.monotonic() - began, await events_of_models(replicas)
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))
        if setting.proxy is not None:
            setting.proxy.stop()
    tally = vars(clients.tally)
    memory = {each.name: [f"{value / (1 << 20):.0f}" for _, value in each.memory] for each in replicas}
    return campaign.strikes, {
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "faults": len(campaign.strikes),
        **{name: tally[name] for name in (*COUNTS, "slowest", "problems")},
        "bad_requests_by_status": {str(status): count for status, count in sorted(bad.answered.items())},
        "model_events": model_events,
        "server_starts": {each.name: each.starts for each in replicas},
        "exit_statuses": {each.name: each.exits for each in replicas},
        "memory_mib_first_peak_last": {
            name: [values[len(values) // 20], max(values, key=float), values[-1]]
            for name, values in memory.items()
            if values
        },
        "not_recovered": [each.fault for each in campaign.strikes if each.recovered is None],
        "ended_well": ended_well,
    }


def main() -> int:
    options = read_arguments()
    # Raises SystemExit, so that servers are stopped and mounts removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [fault for fault in FAULTS if fault.name in options.faults]
    kinds = {fault.kind for fault in chosen}
    with scratch() as folder, contextlib.ExitStack() as exits:
        setting = Setting(folder)
        if options.models == 1:
            setting.unavailable["models"] = "it needs --models"
        else:
            setting.unavailable["parts"] = "a server of several models forks none of their processes"
        if options.device != "cuda":
            setting.unavailable["gpu"] = "it needs --device cuda"
        if kinds & {"s3", "disk", "gpu"} - setting.unavailable.keys():
            sets = (options.cache or folder).resolve() / "sets"
            exits.enter_context(setting.artifacts(sets, Random(options.seed), "--device", options.device))
        else:
            setting.options += ["--backend", "eager", "--build", "off"]
        if "disk" in kinds:
            exits.enter_context(setting.small_disks())
        skipped = {each.name: setting.unavailable[each.kind] for each in chosen if each.kind in setting.unavailable}
        for name, why in skipped.items():
            print(f"NOT INJECTED: {name}: {why}", file=sys.stderr)
        print(f"seed {options.seed}", file=sys.stderr)
        faults = [fault for fault in chosen if fault.name not in skipped]
        strikes, totals = asyncio.run(run(options, setting, faults))
    write_report(options.json, strikes, totals, skipped)
    return 0 if went_well(totals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
