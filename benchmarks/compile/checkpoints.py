"""Serves two checkpoints of the same shapes from one artifact set: both run compiled, and nothing is built.

    python -m snapcap.benchmarks.compile.checkpoints [--cache FOLDER] [--json FILE]

The second checkpoint is the demo model with every weight disturbed a little, as if fine-tuned. Compiled captions of
both are compared with their own eager ones; exits 1 where anything differs, or the store has changed.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import add_files, make_parser
from snapcap.benchmarks.harness.common import DEMO, build_store, samples, scratch, serve_command
from snapcap.benchmarks.harness.server import serving
from snapcap.benchmarks.report.tables import Report


def disturbed(folder: Path) -> Path:
    """A copy of the demo checkpoint with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    copy = folder / "disturbed"
    copy.mkdir()
    for file in DEMO.glob("*.json"):
        shutil.copy(file, copy)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(DEMO / "model.safetensors")
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std(correction=0)
        weights[name] = (tensor.float() + 0.6 * noise).to(tensor.dtype)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def serve(checkpoint: Path, cache: Path, *options: str) -> tuple[dict[str, Any], list[str]]:
    """/startup and the captions of all samples."""
    command = serve_command("--model", str(checkpoint), "--cache-dir", str(cache), *options)
    with serving(command) as server:
        connection = server.connect()
        server.wait_ready(connection)
        captions = [server.caption(connection, image).json()["caption"] for image, _ in samples().values()]
        connection.close()
        startup: dict[str, Any] = server.get("/startup").json()
        return startup, captions


def files(cache: Path) -> dict[str, int]:
    """Everything in the store, with its time of change."""
    return {str(path): path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


def main() -> int:
    parser = make_parser(__doc__)
    add_files(parser)
    options = parser.parse_args()
    rows, good, all_captions = [], True, []
    with scratch(options.cache) as cache, tempfile.TemporaryDirectory(prefix="snapcap-bench-") as folder:
        build_store(cache)
        before = files(cache)
        for name, checkpoint in (("demo", DEMO), ("demo, every weight disturbed", disturbed(Path(folder)))):
            startup, captions = serve(checkpoint, cache)
            _, eager = serve(checkpoint, cache, "--backend", "eager")
            warm = sum(bucket["backend"] == "aot" and bucket["state"] == "warm" for bucket in startup["buckets"])
            unchanged, equal = files(cache) == before, sum(a == b for a, b in zip(captions, eager, strict=True))
            rows.append(
                [
                    name,
                    startup["artifacts"]["result"],
                    startup["artifacts"]["key"][:12],
                    f"{warm} of {len(startup['buckets'])}",
                    json.dumps(startup["build"]),
                    "unchanged" if unchanged else "changed",
                    f"{equal} of {len(captions)}",
                ]
            )
            good &= warm == len(startup["buckets"]) and startup["build"] is None
            good &= unchanged and equal == len(captions)
            all_captions.append(captions)
    different = sum(a != b for a, b in zip(*all_captions, strict=True))
    report = Report()
    columns = ["checkpoint", "artifacts", "key", "buckets aot", "build", "store", "captions as eager"]
    note = f"The two checkpoints disagree on {different} of {len(all_captions[0])} captions: they are two models."
    report.add("One artifact set, two checkpoints of the same shapes", columns, rows, note)
    report.write(options.json, {"captions": all_captions})
    return 0 if good and different else 1


if __name__ == "__main__":
    sys.exit(main())
