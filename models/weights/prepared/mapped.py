"""Maps a file of prepared weights, to be read in place. No torch."""

import hashlib
import mmap
import os
from typing import BinaryIO

from snapcap.models.dataclass import dataclass
from snapcap.models.weights.prepared.header import CHUNK_BYTES, Header, PreparedError, read_header


@dataclass(frozen=True)
class MappedWeights:
    """``memory``: the whole file; its tensors begin at ``begin``, where a page does. It is private: what is written
    there, if anything ever is, does not reach the file. It stays what it is when the file is replaced."""

    header: Header
    begin: int
    memory: mmap.mmap

    def damaged_chunks(self) -> list[int]:
        """The numbers of the chunks that are not what their SHA-256 says. Reads all of the file: no start does."""
        with memoryview(self.memory) as memory:
            return [
                number
                for number, digest in enumerate(self.header.chunks)
                if hashlib.sha256(self._chunk(memory, number)).hexdigest() != digest
            ]

    def _chunk(self, memory: memoryview, number: int) -> memoryview:
        begin = self.begin + number * CHUNK_BYTES
        return memory[begin : begin + CHUNK_BYTES]


def map_weights(file: BinaryIO, key: str) -> MappedWeights:
    """Map an open file that was made of what ``key`` says.

    Raises:
        PreparedError: it is damaged, or was made of something else.
        OSError: it cannot be read or mapped.
    """
    size = os.fstat(file.fileno()).st_size
    header, begin = read_header(file, size)
    if header.key != key:
        raise PreparedError("it was made of something else than its name says")
    try:
        memory = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except ValueError:  # it has become shorter
        raise PreparedError("it is being cut off") from None
    return MappedWeights(header, begin, memory)
