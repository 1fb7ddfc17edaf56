"""Maps a file of prepared weights, to be read in place. Imports no torch."""

import hashlib
import mmap
import os
from typing import BinaryIO

from snapcap.models.dataclass import dataclass
from snapcap.models.weights.prepared.header import CHUNK_BYTES, Header, PreparedError, read_header


@dataclass(frozen=True)
class MappedWeights:
    """A mapped file of prepared weights.

    ``memory`` is the whole file. Its tensors begin at ``begin``, a page boundary. The mapping is private, so
    writes never reach the file, and stays valid if the file is replaced.
    """

    header: Header
    begin: int
    memory: mmap.mmap

    def damaged_chunks(self) -> list[int]:
        """Returns the numbers of the chunks that do not match their SHA-256. Reads the whole file, so no start
        calls it."""
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
    """Maps an open file if its key is ``key``.

    Raises:
        PreparedError: the file is damaged, or has another key.
        OSError: the file cannot be read or mapped.
    """
    size = os.fstat(file.fileno()).st_size
    header, begin = read_header(file, size)
    if header.key != key:
        raise PreparedError("it was made of something else than its name says")
    try:
        memory = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except ValueError:  # the file has become shorter
        raise PreparedError("it is being cut off") from None
    return MappedWeights(header, begin, memory)
