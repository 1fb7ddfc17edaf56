"""Describes the peers: how each is started, and what it needs on this machine."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from snapcap.benchmarks.harness.server import Endpoint
from snapcap.benchmarks.harness.workload import ROOT, Workload, environment

ARCHITECTURE, DECODER = "VisionEncoderDecoderModel", "gpt2"
# The sources and packages on which an export depends, beside the checkpoint.
_SOURCES = ("onnx_captioner.py", "onnx_export.py")
_PACKAGES = ("onnxruntime", "onnxscript", "torch", "transformers")


@dataclass(frozen=True)
class Peer:
    """A server that is not snapcap."""

    title: str
    module: str
    needs: tuple[str, ...]
    api: Endpoint
    options: tuple[str, ...] = ()

    def unavailable(self, workload: Workload, device: str) -> str:
        """Returns why the peer cannot be measured here, or an empty text if it can."""
        missing = self.missing
        return f"not installed: {', '.join(missing)}" if missing else ""

    def prepare(self, workload: Workload, sets: Path) -> None:
        """Makes files that a start needs and does not make itself, in the folder of artifact sets. Most peers need
        none."""

    def model(self, workload: Workload, sets: Path) -> Path:
        """Returns the folder that the peer serves."""
        return workload.folder

    def command(self, workload: Workload, device: str, sets: Path) -> tuple[str, ...]:
        model = ("--model", str(self.model(workload, sets)), "--device", device)
        return (sys.executable, "-m", self.module, *model, *self.options)

    @property
    def missing(self) -> list[str]:
        """The packages that the peer needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class OnnxPeer(Peer):
    """The ONNX Runtime server. The onnxruntime package runs on a CPU only."""

    def unavailable(self, workload: Workload, device: str) -> str:
        config = json.loads((workload.folder / "config.json").read_text())
        kind = (config["architectures"], config.get("decoder", {}).get("model_type"))
        if device != "cpu":
            return "measured on a CPU alone: onnxruntime has no other device"
        if kind != ([ARCHITECTURE], DECODER):
            return f"only a {ARCHITECTURE} with {DECODER} is exported"
        return super().unavailable(workload, device)

    def prepare(self, workload: Workload, sets: Path) -> None:
        output = self.model(workload, sets)
        if not output.is_dir():
            command = [sys.executable, "-m", "snapcap.benchmarks.peers.onnx_export"]
            command += ["--model", str(workload.folder), "--output", str(output)]
            done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the export to ONNX failed:\n{done.stderr}")

    def model(self, workload: Workload, sets: Path) -> Path:
        return exported(workload.folder, sets)


@cache
def exported(checkpoint: Path, sets: Path) -> Path:
    """Returns the folder of a checkpoint's export, which depends on the checkpoint, the exporter and the packages'
    versions."""
    digest = hashlib.sha256(json.dumps([version(name) for name in _PACKAGES]).encode())
    files = [each for each in sorted(checkpoint.iterdir()) if each.suffix in (".json", ".safetensors")]
    for file in [*files, *(Path(__file__).parent / name for name in _SOURCES)]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return sets / "onnx" / digest.hexdigest()[:16]


_PLAIN = Peer(
    "FastAPI + transformers generate",
    "snapcap.benchmarks.peers.transformers_server",
    ("transformers", "fastapi", "uvicorn"),
    Endpoint("/caption", None),
)
PEERS = {
    "transformers-eager": _PLAIN,
    "transformers-1-thread": replace(_PLAIN, title="the same, set_num_threads(1)", options=("--threads", "1")),
    "transformers-compile": replace(_PLAIN, title="FastAPI + transformers, torch.compile", options=("--compile",)),
    "onnxruntime": OnnxPeer(
        "FastAPI + ONNX Runtime",
        "snapcap.benchmarks.peers.onnx_server",
        ("onnxruntime", "onnxscript", "transformers", "fastapi", "uvicorn"),
        Endpoint("/caption", None),
    ),
}
