"""Uploads a mapped file to a GPU through pinned memory, without torch.

    readers        [ file's pages → own pinned chunk ] …      several, each with one chunk
    copy stream           [ chunk → device ][ chunk → device ] …

`models.weights.upload` does the same with torch's tensors, and gives the reasons.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np

from snapcap.warmup.runtime.aoti.cuda_runtime import CudaRuntime, array_at

READERS = 4
CHUNK_BYTES = 4 << 20


def upload(source: "np.ndarray[Any, np.dtype[np.uint8]]", target: int, cuda: CudaRuntime) -> None:
    """Copy bytes to an address of the device; waits for the last of them.

    Raises:
        CudaError: a copy fails.
    """
    stream, begun = cuda.new_stream(), cuda.new_event()
    cuda.record(begun)  # the buffer has been made there
    cuda.call("cudaStreamWaitEvent", stream, begun, 0)
    chunks = count()

    def read() -> None:
        cuda.call("cudaSetDevice", cuda.index)
        address, copied = cuda.pinned(CHUNK_BYTES), cuda.new_event()
        chunk = array_at(address, np.uint8, (CHUNK_BYTES,))
        while (start := next(chunks) * CHUNK_BYTES) < len(source):
            piece = source[start : start + CHUNK_BYTES]
            cuda.wait(copied)  # the chunk's last content is on the device
            chunk[: len(piece)] = piece
            cuda.copy(target + start, address, len(piece), stream)
            cuda.record(copied, stream)
        cuda.wait(copied)
        cuda.call("cudaFreeHost", address)

    with ThreadPoolExecutor(READERS, thread_name_prefix="snapcap-weights") as pool:
        readers = [pool.submit(read) for _ in range(READERS)]
    for reader in readers:
        reader.result()
