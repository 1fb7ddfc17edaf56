"""Names the cases of `snapcap bench startup`."""

from snapcap.benchmarks.peers.commands import PEERS

FLOOR = "floor"
IMPORT_TORCH = "import-torch"
TITLES = {
    FLOOR: "floor: import torch, device, weights",
    IMPORT_TORCH: "python -c 'import torch'",
    "eager": "snapcap, eager",
    "aot": "snapcap, aot, folder store",
    "aot-s3": "snapcap, aot, S3, nothing cached",
    "jit": "snapcap, jit, caches restored",
    "jit-cold": "snapcap, jit, nothing cached",
    "cold": "snapcap, empty store, building",
    "full-compile": "full-model torch.compile",
    "full-compile-restored": "full-model torch.compile, restored",
    "regional-compile": "regional torch.compile",
    "regional-compile-restored": "regional torch.compile, restored",
    **{name: peer.title for name, peer in PEERS.items()},
}
PEER = "transformers-eager"
DEFAULT = (FLOOR, "aot", "eager", "cold", PEER)
# These compile for as long as it takes, so once is enough; what they have compiled is kept for their warm case.
ONCE = ("jit-cold", "full-compile", "regional-compile", "transformers-compile")
# These are started once more to name the processes they start. In the first ones there must be no compiler.
WARM = ("aot", "aot-s3", "eager")
WATCHED = (*WARM, "jit")
