"""Uploads a checkpoint's tensors to a CUDA device, through pinned memory.

    readers        [ file's pages → own pinned chunk ] …      several, each with one chunk
    copy stream           [ chunk → device ][ chunk → device ] …

If tensors were copied directly from the file's pages, the driver would stage them one after the other, and nothing
else would be read meanwhile. Here several readers copy from the file in parallel, while the device fetches their
chunks. Chunks are few and small, because pinning memory takes about 0.3 ms a MB.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

READERS = 4
CHUNK_BYTES = 4 << 20

_Piece = tuple[Tensor, Tensor]  # uint8 [n] of the file, uint8 [n] on the device


def upload(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors on the device, in the dtype of the file. For a CPU they stay in the file's own pages.

    Work queued on the current stream after this call runs after the copies. The host does not wait for the
    device's last copies.
    """
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    placed = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in tensors.items()}
    batches: SimpleQueue[list[_Piece]] = SimpleQueue()
    for batch in batched(pieces((_bytes(t), _bytes(placed[name])) for name, t in tensors.items())):
        batches.put(batch)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # freed memory may still be in use on the current stream
    with ThreadPoolExecutor(READERS, thread_name_prefix="snapcap-weights") as pool:
        readers = [pool.submit(_read, batches, stream) for _ in range(READERS)]
    for reader in readers:
        reader.result()
    torch.cuda.current_stream(device).wait_stream(stream)
    return placed


def pieces(pairs: Iterable[_Piece], size: int = CHUNK_BYTES) -> Iterator[_Piece]:
    """Yields every pair in parts of at most ``size`` bytes."""
    for source, target in pairs:
        for start in range(0, len(source), size):
            yield source[start : start + size], target[start : start + size]


def batched(parts: Iterable[_Piece], size: int = CHUNK_BYTES) -> Iterator[list[_Piece]]:
    """Yields lists of parts that fill a chunk together, because most tensors of a checkpoint are small biases and
    norms."""
    batch: list[_Piece] = []
    filled = 0
    for part in parts:
        if filled + len(part[0]) > size:
            yield batch
            batch, filled = [], 0
        batch.append(part)
        filled += len(part[0])
    if batch:
        yield batch


def fill(chunk: Tensor, batch: Iterable[_Piece]) -> list[_Piece]:
    """Reads a batch into a chunk [uint8]. Returns the pieces with their sources in the chunk."""
    filled, offset = [], 0
    for source, target in batch:
        staged = chunk[offset : offset + len(source)]
        # numpy releases the GIL, and unlike torch does not start a thread team for every reader.
        staged.numpy()[:] = source.numpy()
        filled.append((staged, target))
        offset += len(source)
    return filled


def _read(batches: "SimpleQueue[list[_Piece]]", stream: torch.cuda.Stream) -> None:
    """Copies batches until there are no more."""
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        while True:
            try:
                batch = batches.get_nowait()
            except Empty:
                return
            copied.synchronize()  # waits until the chunk's last contents are on the device
            for staged, target in fill(chunk, batch):
                target.copy_(staged, non_blocking=True)
            copied.record(stream)


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes, uint8 [n], without a copy if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
