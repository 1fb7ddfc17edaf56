"""Divides the memory for pixels between images that are decoded at the same time.

Half of it is the decode processes' in equal shares, for which none has to ask: what most images take is far less.
An image that takes more than a share waits for its part of the other half.
"""

from snapcap.service.config.settings import Settings
from snapcap.service.errors import Overloaded
from snapcap.service.memory.budget import MemoryBudget, memory_limit

# Images that wait for the second half, at most: by the time that more had their turn, most would be too late.
_MOST_WAITING = 16


class ImageMemoryFull(Overloaded):
    """As many large images wait for memory as may."""

    code = "image_memory_full"
    title = "Too many large images"

    def __init__(self) -> None:
        super().__init__("As many large images wait for memory to be decoded as may")


def decode_memory(settings: Settings) -> int:
    """Bytes that images may take together while they are decoded: what was asked for, or the server's share of the
    memory that there is."""
    asked = settings.images.decode_memory
    return MemoryBudget.of(memory_limit()).pixels if asked is None else asked


class ImageRoom:
    """`total`: bytes that images may take while they are decoded, of `processes` at a time."""

    def __init__(self, total: int, processes: int) -> None:
        self.share = total // (2 * processes)
        self.most = max(total // 2, self.share)
        # One process is for the others, as long as there are two.
        self._processes = max(processes - 1, 1)
        self._taken = 0
        self._takers = 0

    def refusal(self, waiting: int) -> ImageMemoryFull | None:
        """Of one more image that takes more than a share, where so many wait already."""
        return ImageMemoryFull() if waiting >= _MOST_WAITING else None

    def fits(self, size: int) -> bool:
        """Whether there is room for so many bytes now, which are more than a share."""
        return self._takers < self._processes and self._taken + size <= self.most

    def take(self, size: int) -> None:
        """Of one image."""
        self._taken += size
        self._takers += 1

    def give_back(self, size: int) -> None:
        self._taken -= size
        self._takers -= 1
