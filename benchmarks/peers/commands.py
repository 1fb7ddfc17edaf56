"""Lists the peers."""

from dataclasses import replace

from snapcap.benchmarks.harness.server import Endpoint
from snapcap.benchmarks.peers.onnx.peer import OnnxPeer
from snapcap.benchmarks.peers.peer import Peer

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
        "snapcap.benchmarks.peers.onnx.server",
        ("onnxruntime", "onnxscript", "transformers", "fastapi", "uvicorn"),
        Endpoint("/caption", None),
    ),
}
