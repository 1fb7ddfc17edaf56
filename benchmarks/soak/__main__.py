"""Runs a campaign of faults: two servers behind a balancer, good and bad traffic, and counts of lost requests.

    python -m snapcap.benchmarks.soak --minutes 30 [--seed N] [--faults all] [--device cpu] [--cache FOLDER]
        [--json FILE]

Each fault is injected once, and then faults come at random. Faults that cannot be injected here are named, with
the reason. Good clients retry as the API tells them to, and each caption is compared with the known one. A server
that ends is started again. A server whose /livez does not answer is ended, as in Kubernetes. The exit status is 1
if a request was lost, a caption was wrong, or a server answered 500 or did not recover. Traffic goes to 127.0.0.1
only.
"""

import argparse
import asyncio
import contextlib
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from snapcap.benchmarks.harness.arguments import add_files, add_serve, count, make_parser, some_of
from snapcap.benchmarks.harness.workload import SNAPCAP, scratch
from snapcap.benchmarks.report.tables import Report
from snapcap.benchmarks.soak.balancer import Balancer
from snapcap.benchmarks.soak.campaign import Campaign, Fault, Strike, World, watched
from snapcap.benchmarks.soak.clients import BadClients, GoodClients, Tally
from snapcap.benchmarks.soak.faults import CLIENT_FAULTS, GPU_FAULTS, PROCESS_FAULTS, STORE_FAULTS
from snapcap.benchmarks.soak.replica import Replica
from snapcap.benchmarks.soak.setting import Setting, artifacts, direct_proxy, small_disks, steppable_clock

_COUNTS = ["requests", "retried", "lost", "wrong"]
_COLUMNS = ["fault", "server", "at s", "recovered s", *_COUNTS, "/livez ms", "control ms", "peak MiB"]
_NOTE = (
    "recovered: until the server was ready, captioned rightly, and had what was broken. /livez: the worst while "
    "servers were up; control: that of a server that does nothing."
)
FAULTS = (*PROCESS_FAULTS, *STORE_FAULTS, *CLIENT_FAULTS, *GPU_FAULTS)
NAMES = ("one", "two")
# Time limits are short enough for a campaign to wait for. There are two decode processes, to be stopped and
# killed.
OPTIONS = (
    *("--decode-processes", "2", "--queue-size", "32", "--request-timeout", "10"),
    *("--drain-delay", "1", "--grace-period", "10", "--body-timeout", "5", "--watchdog-timeout", "5"),
    *("--store-deadline", "8", "--s3-connect-timeout", "1", "--s3-read-timeout", "2", "--s3-deadline", "8"),
)
LAUNCHER = (sys.executable, "-m", "snapcap.benchmarks.soak.launcher")
SETTLE_S = 5.0


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def mib(count: float) -> str:
    return f"{count / (1 << 20):.0f}"


def row(strike: Strike) -> list[str]:
    recovered = "NEVER" if strike.recovered is None else f"{strike.recovered:.1f}"
    counts = [str(each) for each in (strike.requests, strike.retried, strike.lost, strike.wrong)]
    worst = [ms(strike.livez), ms(strike.control), mib(strike.peak)]
    return [strike.fault, strike.replica, f"{strike.at:.0f}", recovered, *counts, *worst]


def write_report(file: Path | None, strikes: list[Strike], totals: dict[str, Any], skipped: dict[str, str]) -> None:
    """Prints the tables. Also writes them if a file is given."""
    report = Report()
    report.add("Faults, in the order in which they were injected", _COLUMNS, [row(each) for each in strikes], _NOTE)
    report.add("Not injected", ["fault", "why"], [[name, why] for name, why in skipped.items()])
    report.add("The whole campaign", ["", "value"], [[name, str(value)] for name, value in totals.items()])
    report.write(file, {"strikes": [asdict(each) for each in strikes], "totals": totals, "skipped": skipped})


def totals_of(
    seed: int, seconds: float, tally: Tally, bad: BadClients, replicas: list[Replica], strikes: list[Strike]
) -> dict[str, Any]:
    """Returns the totals of the good clients, the bad clients and the servers."""
    answered = {str(status): count for status, count in sorted(bad.answered.items())}
    memory = {each.name: [value for _, value in each.memory] for each in replicas}
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "faults": len(strikes),
        "requests": tally.requests,
        "retried by clients": tally.retried,
        "lost": tally.lost,
        "wrong": tally.wrong,
        "slowest request s": round(tally.slowest, 1),
        "bad requests, by status": answered,
        "server starts": {each.name: each.starts for each in replicas},
        "exit statuses": {each.name: each.exits for each in replicas},
        "memory MiB: first, peak, last": {
            name: [mib(values[len(values) // 20]), mib(max(values)), mib(values[-1])]
            for name, values in memory.items()
            if values
        },
        "not recovered": [each.fault for each in strikes if each.recovered is None],
        "problems": tally.problems,
    }


def went_well(totals: dict[str, Any]) -> bool:
    """Returns whether no request was lost, no caption wrong, no server answered 500, and every server recovered."""
    failed = totals["lost"] or totals["wrong"] or totals["not recovered"] or not totals["ended well"]
    return not failed and "500" not in totals["bad requests, by status"]


def read_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--seed", type=int, help="seed of everything random (default: a random seed, which is printed)"
    )
    names = some_of(fault.name for fault in FAULTS)
    parser.add_argument(
        "--faults", type=names, default="all", help="all, or a comma-separated list (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clients", type=count, default=6, help="number of good clients")
    add_files(parser)
    add_serve(parser)
    return parser.parse_args()


async def run(options: argparse.Namespace, setting: Setting, faults: Sequence[Fault], seed: int) -> dict[str, Any]:
    """Runs the campaign. Returns its strikes and totals."""
    console, chooser = Console(stderr=True), Random(seed)
    if setting.proxy is not None:
        await setting.proxy.start()
        direct_proxy(setting)
    command = [*(LAUNCHER if options.device == "cuda" else SNAPCAP), "serve", "--host", "127.0.0.1"]
    command += ["--device", options.device, *OPTIONS, *setting.options, *shlex.split(options.serve)]
    replicas = [Replica(name, command, setting.environment, setting.cache(name)) for name in NAMES]
    bad, balancer = BadClients(replicas, chooser), Balancer(replicas)
    world = World(replicas, setting.proxy, setting.clock, bad, chooser)
    try:
        for replica in replicas:
            replica.start()
        await balancer.start()
        clients = GoodClients(balancer.port, options.clients, chooser)
        with watched(replicas) as watches:
            campaign = Campaign(world, clients, watches, console)
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
        seconds = time.monotonic() - began
        totals = totals_of(seed, seconds, clients.tally, bad, replicas, campaign.strikes)
        totals |= {"retried by the balancer": balancer.retried, "ended well": ended_well}
        return {"strikes": campaign.strikes, "totals": totals}
    finally:
        await balancer.stop()
        await asyncio.gather(*(replica.stop() for replica in replicas))
        if setting.proxy is not None:
            setting.proxy.stop()


def main() -> int:
    options = read_arguments()
    # Raises SystemExit, so that servers are stopped and mounts removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    chosen = [fault for fault in FAULTS if fault.name in options.faults]
    kinds = {fault.kind for fault in chosen}
    with scratch() as folder, contextlib.ExitStack() as exits:
        setting = Setting(folder)
        if options.device != "cuda":
            setting.unavailable["gpu"] = "it needs --device cuda"
        if kinds & {"s3", "disk", "gpu"} - setting.unavailable.keys():
            sets = (options.cache or folder).resolve() / "sets"
            exits.enter_context(artifacts(setting, sets, Random(seed), "--device", options.device))
        else:
            setting.options += ["--backend", "eager", "--build", "off"]
        if "disk" in kinds:
            exits.enter_context(small_disks(setting, list(NAMES)))
        if "clock" in kinds:
            steppable_clock(setting)
        skipped = {each.name: setting.unavailable[each.kind] for each in chosen if each.kind in setting.unavailable}
        for name, why in skipped.items():
            print(f"NOT INJECTED: {name}: {why}", file=sys.stderr)
        print(f"seed {seed}", file=sys.stderr)
        faults = [fault for fault in chosen if fault.name not in skipped]
        found = asyncio.run(run(options, setting, faults, seed))
    write_report(options.json, found["strikes"], found["totals"], skipped)
    return 0 if went_well(found["totals"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
