"""Reads the tensors of a checkpoint folder, and uploads them to a CUDA device through pinned memory.

    readers        [ file's pages → own pinned chunk ] …      several, each with one chunk
    copy stream           [ chunk → device ][ chunk → device ] …

If tensors were copied directly from the file's pages, the driver would stage them one after the other, and nothing
else would be read meanwhile. Here several readers copy from the file in parallel, while the device fetches their
chunks. Chunks are few and small, because pinning memory takes about 0.3 ms a MB.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from snapcap.models.errors import WeightsError, headline
from snapcap.models.fields import IS_POINTER, POINTER
from snapcap.models.weights.listing import weight_files, weight_places


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns every tensor of the checkpoint by name, memory-mapped on the CPU, in the dtype of the file.

    ``.bin`` files are pickles. They are read with ``weights_only=True``, which runs no code. If several files hold
    a tensor, the file that the index names is read; if that file lacks it, another that has it. Raises WeightsError
    if a file cannot be read, or two files hold a tensor and the index names neither."""
    tensors: dict[str, Tensor] = {}
    elsewhere: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    places = weight_places(folder)
    for path in weight_files(folder):
        file = path.relative_to(folder).as_posix()
        for name, tensor in _read(path).items():
            if places.get(name, file) != file:
                elsewhere[name] = tensor
                continue
            if name in files:
                raise WeightsError(
                    f"{files[name]} and {file} both hold {name!r}, and the index names neither for it"
                )
            tensors[name], files[name] = tensor, file
    return {**elsewhere, **tensors}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return _tensors(path)
    except pickle.UnpicklingError as error:  # torch's own message suggests loading the file unsafely
        raise WeightsError(
            f"{path.name} is refused: it is damaged, or holds more than tensors, which could run code; "
            "save the model as safetensors"
        ) from error
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror or headline(error)}: {path}") from error
    except (ValueError, RuntimeError, EOFError) as error:
        raise WeightsError(f"{path.name} cannot be read: {headline(error)}") from error
    except Exception as error:  # safetensors raises its own type, a direct subclass of Exception
        raise WeightsError(f"{path.name} is damaged: {headline(error)}") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        head = file.read(len(POINTER))
    if head == POINTER:
        raise ValueError(IS_POINTER)
    # A safetensors file has any name: its length field is followed by a JSON header.
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        from safetensors.torch import load_file  # noqa: PLC0415 - only safetensors files need it

        return load_file(path)
    mappable = head[:2] == b"PK"  # a zip; torch wrote plain pickles before 1.6
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, a dictionary of tensors is expected")
    tensors = {
        name: tensor for name, tensor in state.items() if isinstance(name, str) and isinstance(tensor, Tensor)
    }
    if not tensors:
        raise ValueError("it holds no tensors by name; save the model's state_dict alone")
    return tensors


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
        readers = [pool.submit(_copy, batches, stream) for _ in range(READERS)]
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


def _copy(batches: "SimpleQueue[list[_Piece]]", stream: torch.cuda.Stream) -> None:
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
