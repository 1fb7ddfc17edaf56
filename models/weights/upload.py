"""Uploads a checkpoint's tensors to a CUDA device, through pinned memory.

    readers        [ file's pages → own pinned chunk ] …      several, each with one chunk
    copy stream           [ chunk → device ][ chunk → device ] …

A copy from the file's own pages is staged by the driver, one tensor after the other, while nothing else is read.
Here the readers are memory copies side by side, and the device fetches their chunks meanwhile. Chunks are few and
small: pinning memory takes about 0.3 ms a MB.
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
    """The same tensors on the device, in the dtype of the file; those for a CPU stay in the file's own pages.

    Work that is given to the current stream after this comes after the copies; the host does not wait for them.
    """
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    placed = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in tensors.items()}
    batches: SimpleQueue[list[_Piece]] = SimpleQueue()
    for batch in batched(pieces((_bytes(t), _bytes(placed[name])) for name, t in tensors.items())):
        batches.put(batch)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # memory that is free again may still be in use there
    with ThreadPoolExecutor(READERS, thread_name_prefix="snapcap-weights") as pool:
        readers = [pool.submit(_read, batches, stream) for _ in range(READERS)]
    for reader in readers:
        reader.result()
    torch.cuda.current_stream(device).wait_stream(stream)
    return placed


def pieces(pairs: Iterable[_Piece], size: int = CHUNK_BYTES) -> Iterator[_Piece]:
    """Every pair in parts of at most ``size`` bytes."""
    for source, target in pairs:
        for start in range(0, len(source), size):
            yield source[start : start + size], target[start : start + size]


def batched(parts: Iterable[_Piece], size: int = CHUNK_BYTES) -> Iterator[list[_Piece]]:
    """Parts that fill a chunk together: most tensors of a checkpoint are biases and norms."""
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
    """Read a batch into a chunk [uint8]; returns the pieces with their sources there."""
    filled, offset = [], 0
    for source, target in batch:
        staged = chunk[offset : offset + len(source)]
        # By numpy: it lets other threads run, and unlike torch does not bring a team of its own to every reader.
        staged.numpy()[:] = source.numpy()
        filled.append((staged, target))
        offset += len(source)
    return filled


def _read(batches: "SimpleQueue[list[_Piece]]", stream: torch.cuda.Stream) -> None:
    """Copy batches until there are no more."""
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        while True:
            try:
                batch = batches.get_nowait()
            except Empty:
                return
            copied.synchronize()  # what the chunk held is on the device
            for staged, target in fill(chunk, batch):
                target.copy_(staged, non_blocking=True)
            copied.record(stream)


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [n], without a copy where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
