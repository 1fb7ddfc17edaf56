"""Describes the ONNX Runtime server as a peer. Its models are exported once and kept."""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from snapcap.benchmarks.harness.common import ROOT, environment
from snapcap.benchmarks.harness.workload import Workload
from snapcap.benchmarks.peers.peer import Peer

ARCHITECTURE, DECODER = "VisionEncoderDecoderModel", "gpt2"
# The sources and packages on which an export depends, beside the checkpoint.
_SOURCES = ("description.py", "modules.py", "export.py")
_PACKAGES = ("onnxruntime", "onnxscript", "torch", "transformers")


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
            command = [sys.executable, "-m", "snapcap.benchmarks.peers.onnx.export"]
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
