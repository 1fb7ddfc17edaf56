"""The one-way rules, between layers and between their rooms, and what a server must never import."""

import ast
import json
from pathlib import Path

import pytest
from support.servers.server_process import python

ROOT = Path(__file__).parent.parent
# The rooms of each layer, in the order of the flow: each imports only from those before it. What stands in one
# tuple knows nothing of each other.
ROOMS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "models": (
        ("errors", "json_object", "dataclass"),
        ("names", "text"),
        "dimensions",
        "fields",
        "processing",
        "families",
        "config",
        "memory",
        "kernels",
        "layers",
        "regions",
        "weights",
        "demo",
    ),
    "warmup": (
        ("errors", "version", "option", "cache_folder"),
        "options",
        "machine",
        "s3",
        "checkpoints",
        "artifacts",
        "plan",
        "progress",
        "weights",
        "runtime",
        "build",
        "start",
    ),
    "service": (
        ("errors", "readiness"),
        "limits",
        "config",
        "memory",
        "ipc",
        "telemetry",
        "engine",
        "watch",
        "images",
        "captioning",
        "http",
        "api",
        ("server", "offline"),
        "cli",
    ),
    "benchmarks": (
        "harness",
        "peers",
        "contenders",
        ("engine", "soak"),
        ("latency", "modes", "startup"),
        "figures",
        "command",
    ),
}
LAYERS = {"models": 0, "warmup": 1, "service": 2, "benchmarks": 3}
FORBIDDEN = {
    "models": {"boto3", "fastapi", "starlette", "uvicorn", "prometheus_client"},
    "warmup": {"fastapi", "starlette", "uvicorn", "prometheus_client"},
    "service": {"transformers"},
    "benchmarks": set(),
}


def sources(layer: str) -> list[Path]:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert len(files) > 10
    return files


def imported(source: Path) -> set[str]:
    """Dotted names of every module a file imports, wherever in it; of ``from a import b`` also ``a.b``."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{source}: write the whole name"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("layer", ROOMS)
def test_imports_go_one_way(layer: str) -> None:
    wrong = []
    for file in sources(layer):
        for name in imported(file):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            # `snapcap bench` is the one command that is another layer's.
            is_bench = (file.parts[-2:], other) == (("cli", "main.py"), "benchmarks")
            if (
                top in LAYERS
                or top in FORBIDDEN[layer]
                or (top == "snapcap" and LAYERS.get(other, -1) > LAYERS[layer] and not is_bench)
            ):
                wrong.append((str(file.relative_to(ROOT)), name))
    assert wrong == []


@pytest.mark.parametrize("layer", ROOMS)
def test_rooms_are_in_the_order_of_the_flow(layer: str) -> None:
    order = [(each,) if isinstance(each, str) else each for each in ROOMS[layer]]
    place = {room: number for number, rooms in enumerate(order) for room in rooms}
    entries = {path.stem for path in (ROOT / layer).iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert entries - {"__init__"} == set(place), "each entry of the layer has its place here"
    back = set()
    for file in sources(layer):
        own = Path(file.relative_to(ROOT / layer).parts[0]).stem
        for name in imported(file):
            parts = name.split(".")
            other = parts[2] if parts[:2] == ["snapcap", layer] and len(parts) > 2 else own
            if other != own and place.get(other, -1) >= place[own]:
                back.add((str(file.relative_to(ROOT)), name))
    assert back == set()


@pytest.mark.parametrize("layer", ["models", "warmup", "service"])
def test_no_start_waits_for_compiled_dataclasses(layer: str) -> None:
    users = {str(file.relative_to(ROOT)) for file in sources(layer) if "dataclasses.dataclass" in imported(file)}
    assert users <= {"models/dataclass.py"}, "import it from snapcap.models.dataclass"


def test_files_stay_small() -> None:
    sizes = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for layer in ROOMS
        for file in sources(layer)
    }
    assert {file: lines for file, lines in sizes.items() if lines > 700} == {}


def test_a_caption_on_eager_imports_no_compiler_and_no_transformers() -> None:
    program = """
import json, sys
from pathlib import Path
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.start.start import load
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
folder = Path(sys.argv[1])
options = StartOptions(ModelOptions(cache_dir=folder), ComputeOptions(backend="eager"))
load(options, Timeline.since_exec(), StartupStatus())
print(json.dumps(sorted(sys.modules)))
"""
    run = python("-c", program, "cache")
    assert run.returncode == 0, run.stderr
    modules = json.loads(run.stdout.splitlines()[-1])
    assert "torch" in modules
    assert [name for name in modules if name.startswith(("torch._dynamo", "transformers", "boto3"))] == []
    assert "torch._inductor.compile_fx" not in modules
