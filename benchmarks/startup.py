"""Cold start, from spawn to the first caption: snapcap eager, compiled and without artifacts, beside the peer.

    python -m benchmarks.startup --runs 5 [--cache FOLDER] [--json FILE]

Every case is a fresh process with a warm page cache; the cases alternate. The artifact set is built first, into
--cache or a temporary folder, which takes a minute. Each caption is compared with the right one.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import (
    DEMO,
    PEER,
    PEER_API,
    SNAPCAP_API,
    Endpoint,
    Report,
    Samples,
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
from benchmarks.moto_store import S3Artifacts, s3_artifacts

IMPORT_TORCH = "python -c 'import torch'"
EAGER = "snapcap, eager"
AOT = "snapcap, aot, folder store"
S3 = "snapcap, aot, S3, nothing cached"
EMPTY = "snapcap, empty store, building"
PEER_CASE = "FastAPI + transformers generate"
WIDTH = 60

Measured = Mapping[str, float]


def import_torch() -> Measured:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=environment(), check=True)
    return {"total": time.perf_counter() - started}


def start_server(
    command: tuple[str, ...],
    api: Endpoint = SNAPCAP_API,
    extra: Mapping[str, str] | None = None,
    check: Callable[[dict[str, Any]], None] = lambda _startup: None,
) -> tuple[Measured, dict[str, Any]]:
    """Seconds until /livez (snapcap), READY and the first caption, and what /startup says then."""
    image, caption = samples()["pair-1.png"]
    with serving(command, api, extra) as server:
        measured: dict[str, float] = {}
        connection = server.connect()
        if api is SNAPCAP_API:
            connection.request("/livez")
            measured["live"] = server.seconds()
            server.wait_ready(connection)
            measured["ready"] = server.seconds()
        reply = server.caption(connection, image)
        measured["first_caption"] = server.seconds()
        if reply.json()["caption"] != caption:
            raise RuntimeError(f"a wrong caption: {reply.body.decode()}")
        startup: dict[str, Any] = server.get("/startup").json() if api is SNAPCAP_API else {}
        connection.close()
    if startup:
        check(startup)
        seconds = phase_seconds(startup)
        measured |= {f"phase {name}": value for name, value in seconds.items()}
        torch_imported = max(phase["end"] for phase in startup["phases"] if phase["name"] == "import_torch")
        measured["live before torch"] = torch_imported - startup["marks"]["live"]
    return measured, startup


def phase_seconds(startup: Mapping[str, Any]) -> dict[str, float]:
    return {phase["name"]: phase["end"] - phase["start"] for phase in startup["phases"]}


def expect(backend: str, building: bool = False) -> Callable[[dict[str, Any]], None]:
    """A start that served something else than the case says is an error, not a result."""

    def check(startup: dict[str, Any]) -> None:
        backends = {bucket["backend"] for bucket in startup["buckets"]}
        states = {bucket["state"] for bucket in startup["buckets"]}
        if startup["tier"] != backend or backends != {backend} or not states <= {"warm", "eager", "captured"}:
            raise RuntimeError(f"expected {backend} in every bucket: {startup}")
        if building and (startup["build"] or {}).get("state") != "building":
            raise RuntimeError(f"expected a build in the background: {startup['build']}")

    return check


def loaded_modules(cache: Path) -> tuple[int, list[str]]:
    """How many modules an aot server has imported after its first caption, and those it must not import."""
    image, _ = samples()["pair-1.png"]
    command = serve_command("--cache-dir", str(cache), "--backend", "aot", "--strict")
    with serving(command, extra={"PYTHONPROFILEIMPORTTIME": "1"}) as server:
        connection = server.connect()
        server.wait_ready(connection)
        server.caption(connection, image)
        connection.close()
        lines = [line for line in server.log().splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    banned = ("torch._dynamo", "torch._inductor", "transformers", "triton")
    return len(modules), sorted(m for m in modules if m.startswith(banned))


def waterfall(startup: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """One row a phase: name, start, seconds, and a bar on a common axis."""
    end = max(startup["marks"]["ready"], *(phase["end"] for phase in startup["phases"]))
    rows = []
    for phase in startup["phases"]:
        first = round(phase["start"] / end * WIDTH)
        last = max(round(phase["end"] / end * WIDTH), first + 1)
        bar = " " * first + "█" * (last - first) + " " * (WIDTH - last)
        rows.append((phase["name"], number(phase["start"], 3), number(phase["end"] - phase["start"], 3), bar))
    for name in ("live", "ready"):
        at = min(round(startup["marks"][name] / end * WIDTH), WIDTH - 1)
        rows.append((name.upper(), number(startup["marks"][name], 3), "", " " * at + "▲" + " " * (WIDTH - 1 - at)))
    return rows


def measure(runs: int, cache: Path, remote: S3Artifacts) -> tuple[dict[str, Samples], dict[str, Any]]:
    """All cases, alternating; and /startup of the last aot start."""
    last: dict[str, Any] = {}

    def aot() -> Measured:
        command = serve_command("--cache-dir", str(cache), "--backend", "aot", "--strict")
        measured, startup = start_server(command, check=expect("aot"))
        last.update(startup)
        return measured

    def fresh(*options: str, backend: str, building: bool, extra: Mapping[str, str] | None = None) -> Measured:
        with tempfile.TemporaryDirectory(prefix="snapcap-bench-") as empty:
            command = serve_command("--cache-dir", empty, *options)
            return start_server(command, extra=extra, check=expect(backend, building))[0]

    cases: dict[str, Callable[[], Measured]] = {
        IMPORT_TORCH: import_torch,
        EAGER: lambda: start_server(serve_command("--backend", "eager"), check=expect("eager"))[0],
        AOT: aot,
        S3: lambda: fresh(
            *remote.options, "--backend", "aot", "--strict", backend="aot", building=False, extra=remote.environment
        ),
        EMPTY: lambda: fresh(backend="eager", building=True),
        PEER_CASE: lambda: start_server((*PEER, "--model", str(DEMO)), PEER_API)[0],
    }
    return interleave(runs, cases), last


def report(results: Mapping[str, Samples], startup: Mapping[str, Any], modules: tuple[int, list[str]]) -> Report:
    floor, eager = results[IMPORT_TORCH].need("total"), results[EAGER]
    peer = results[PEER_CASE].need("first_caption")
    rows = []
    for name, case in results.items():
        first, ready = case.median("first_caption"), case.median("ready")
        rows.append(
            [
                name,
                number(case.median("live")),
                number(ready),
                number(first) or number(case.median("total")),
                ratio(ready, floor),
                ratio(ready, eager.median("ready")),
                ratio(first, floor),
                ratio(first, eager.median("first_caption")),
                ratio(first, peer),
            ]
        )
    out = Report()
    columns = ["exec → …, s", "/livez", "READY", "caption", "READY /torch", "/eager"]
    columns += ["caption /torch", "/eager", "/peer"]
    count = len(next(iter(results.values())).values["total"])
    out.add("Cold start", columns, rows, f"medians of {count} alternating runs; /torch: to `import torch`")

    aot, s3 = results[AOT], results[S3]
    unwanted = f"{len(modules[1])} of {modules[0]}" + (f": {', '.join(modules[1][:3])} …" if modules[1] else "")
    packages = 6 * len({bucket["size"] for bucket in startup["buckets"]})
    facts = [
        ["aot READY, to import torch", ratio(aot.need("ready"), floor), "≤ 1.5 ×"],
        ["aot READY, to eager READY", ratio(aot.need("ready"), eager.need("ready")), "≤ 1.1 ×"],
        [
            "aot READY from S3, more than from the folder",
            f"{s3.need('ready') - aot.need('ready'):+.2f} s",
            "≤ +0.3 s",
        ],
        [f"opening all packages ({packages})", f"{aot.need('phase load_artifacts'):.3f} s", "≤ 0.2 s"],
        ["modules of Dynamo, Inductor, transformers, triton (aot)", unwanted, "0"],
        ["eager /livez, to import torch", ratio(eager.need("live"), floor), "≤ 0.5 ×"],
        ["eager /livez, before torch has been imported", f"{eager.need('live before torch'):.2f} s", "> 0 s"],
        ["eager first caption, to import torch", ratio(eager.need("first_caption"), floor), "≤ 1.5 ×"],
        ["eager first caption, to the peer's", ratio(eager.need("first_caption"), peer), "≤ 0.45 ×"],
        [
            "empty store first caption, to eager's",
            ratio(results[EMPTY].need("first_caption"), eager.need("first_caption")),
            "≤ 1.1 ×",
        ],
    ]
    out.add("Against the targets", ["what", "measured", "target"], facts)
    out.add("One aot start", ["phase", "start s", "s", "0 " + "─" * (WIDTH - 2)], waterfall(startup))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cache", type=Path, help="cache folder with the artifact store, built if it is missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write tables and samples")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(scratch(options.cache))
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="snapcap-bench-")))
        build_store(cache)
        remote = stack.enter_context(s3_artifacts(cache, keys))
        results, startup = measure(options.runs, cache, remote)
        modules = loaded_modules(cache)
    raw = {"samples": {name: case.values for name, case in results.items()}, "startup": startup}
    report(results, startup, modules).write(options.json, raw)


if __name__ == "__main__":
    main()
