"""Captions/s over HTTP at 16 keep-alive clients: snapcap eager and compiled, beside the peer.

    python -m benchmarks.throughput --clients 16 --seconds 10 --rounds 3 [--cache FOLDER] [--json FILE]

All servers run from the beginning; only one is under load at a time, and they take turns. The load generator is a
process of its own and shares the CPUs; every caption is compared with the right one.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.common import (
    DEMO,
    PEER,
    PEER_API,
    ROOT,
    SNAPCAP_API,
    Report,
    Samples,
    Server,
    build_store,
    environment,
    interleave,
    number,
    ratio,
    samples,
    scratch,
    serve_command,
    serving,
)

EAGER, AOT = "snapcap, eager", "snapcap, aot"
PEER_CASE, PEER_TUNED = "FastAPI + transformers", "the same, set_num_threads(1)"
WARM_UP_S = 2.0
_METRIC = re.compile(r'^snapcap_(rows|padding_rows)_total\{component="(\w+)"\} (\S+)$', re.MULTILINE)


def load(server: Server, clients: int, seconds: float) -> dict[str, float]:
    """One stretch of load, with the server's CPU seconds; a wrong caption or a failed request is an error."""
    before, cpu = rows(server), cpu_seconds(server.pid)
    command = [sys.executable, "-m", "benchmarks.load", "--port", str(server.port), "--path", server.api.caption]
    command += ["--clients", str(clients), "--seconds", str(seconds)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    if result["wrong"] or result["errors"]:
        raise RuntimeError(f"{result['wrong']} wrong captions, {result['errors']} errors:\n{server.log()}")
    measured = {
        "captions_per_s": result["captions"] / seconds,
        "p50_ms": result["p50_ms"],
        "p99_ms": result["p99_ms"],
        "server_cpus": (cpu_seconds(server.pid) - cpu) / seconds,
        "client_cpus": result["cpu_s"] / seconds,
        "cpu_ms_per_caption": (cpu_seconds(server.pid) - cpu) / result["captions"] * 1000,
    }
    after = rows(server)
    for component in ("encoder", "decoder"):
        run = after.get(("rows", component), 0) - before.get(("rows", component), 0)
        if run:
            padded = after["padding_rows", component] - before.get(("padding_rows", component), 0)
            measured[f"{component}_padding"] = padded / run
    return measured


def rows(server: Server) -> dict[tuple[str, str], float]:
    """rows_total and padding_rows_total of /metrics, by component."""
    if server.api is not SNAPCAP_API:
        return {}
    text = server.get("/metrics").body.decode()
    return {(name, component): float(value) for name, component, value in _METRIC.findall(text)}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def warm(server: Server, clients: int) -> None:
    connection = server.connect()
    server.wait_ready(connection)
    image, caption = samples()["pair-1.png"]
    if server.caption(connection, image).json()["caption"] != caption:
        raise RuntimeError("a wrong caption")
    connection.close()
    load(server, clients, WARM_UP_S)


def report(results: Mapping[str, Samples], clients: int, seconds: float) -> Report:
    peer = max(results[case].need("captions_per_s") for case in (PEER_CASE, PEER_TUNED))
    table = []
    for name, case in results.items():
        rate = case.need("captions_per_s")
        padding = [case.median(f"{component}_padding") for component in ("encoder", "decoder")]
        table.append(
            [
                name,
                number(rate, 0),
                ratio(rate, peer),
                number(case.need("p50_ms"), 1),
                number(case.need("p99_ms"), 1),
                *("" if share is None else f"{share:.1%}" for share in padding),
                number(case.need("cpu_ms_per_caption"), 2),
                f"{case.need('server_cpus'):.2f} + {case.need('client_cpus'):.2f}",
            ]
        )
    out = Report()
    columns = ["", "cap/s", "/peer", "p50 ms", "p99 ms", "padded: encoder", "decoder", "CPU ms each", "CPUs used"]
    rounds = len(results[PEER_CASE].values["captions_per_s"])
    note = (
        f"medians of {rounds} alternating rounds of {seconds:g} s; padding: rows padded / rows run, from /metrics"
    )
    out.add(f"{clients} keep-alive clients, sample PNGs", columns, table, note)
    eager, aot = results[EAGER].need("captions_per_s"), results[AOT].need("captions_per_s")
    out.add(
        "Against the targets",
        ["what", "measured", "target"],
        [
            ["captions/s, eager to the better peer", ratio(eager, peer), "≥ 3 ×"],
            ["captions/s, aot to the better peer", ratio(aot, peer), "≥ 4.5 ×"],
        ],
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="cache folder with the artifact store, built if it is missing")
    parser.add_argument("--serve", default="", help="further options of snapcap serve, such as '--threads=1'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write tables and samples")
    options = parser.parse_args()
    further = options.serve.split()
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(scratch(options.cache))
        build_store(cache, *(option for option in further if option.startswith(("--threads", "--buckets"))))
        aot = serve_command("--cache-dir", str(cache), "--backend", "aot", "--strict", *further)
        servers = {
            PEER_CASE: stack.enter_context(serving((*PEER, "--model", str(DEMO)), PEER_API)),
            PEER_TUNED: stack.enter_context(serving((*PEER, "--model", str(DEMO), "--threads", "1"), PEER_API)),
            EAGER: stack.enter_context(serving(serve_command("--backend", "eager", *further))),
            AOT: stack.enter_context(serving(aot)),
        }
        for server in servers.values():
            warm(server, options.clients)

        def case(server: Server) -> Callable[[], Mapping[str, float]]:
            return lambda: load(server, options.clients, options.seconds)

        results = interleave(options.rounds, {name: case(server) for name, server in servers.items()})
    raw = {"samples": {name: result.values for name, result in results.items()}}
    report(results, options.clients, options.seconds).write(options.json, raw)


if __name__ == "__main__":
    main()
