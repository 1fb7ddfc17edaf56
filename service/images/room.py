"""Divides the memory for pixels between images that are decoded at the same time.

Half of the memory is divided equally among the decode processes. Most images take far less than such a share. An
image that takes more waits for a part of the other half.
"""

from snapcap.service.config.settings import Settings
from snapcap.service.errors import Overloaded
from snapcap.service.memory.budget import MemoryBudget, memory_limit

# Most images that may wait for the second half. A longer queue would mean that most images come after their
# deadline.
_MOST_WAITING = 16


class ImageMemoryFull(Overloaded):
    """Refuses an image because as many large images wait for memory as may."""

    code = "image_memory_full"
    title = "Too many large images"

    def __init__(self) -> None:
        super().__init__("As many large images wait for memory to be decoded as may")


def decode_memory(settings: Settings) -> int:
    """Returns the bytes of memory that all images together may take while they are decoded: the value of the
    option, or else a fixed part of the server's memory."""
    asked = settings.images.decode_memory
    return MemoryBudget.of(memory_limit()).pixels if asked is None else asked


class ImageRoom:
    """Grants memory to large images. `total`: bytes that all images together may take while they are decoded.
    `processes`: number of decode processes."""

    def __init__(self, total: int, processes: int) -> None:
        self.share = total // (2 * processes)
        self.most = max(total // 2, self.share)
        # With two processes or more, one takes no large image, so that small images do not wait for them.
        self._processes = max(processes - 1, 1)
        self._taken = 0
        self._takers = 0

    def refusal(self, waiting: int) -> ImageMemoryFull | None:
        """Returns the refusal of one more large image if too many (`waiting`) wait already, else None."""
        return ImageMemoryFull() if waiting >= _MOST_WAITING else None

    def fits(self, size: int) -> bool:
        """Returns whether a large image of `size` bytes may be decoded now."""
        return self._takers < self._processes and self._taken + size <= self.most

    def take(self, size: int) -> None:
        """Takes the memory of a large image, `size` bytes."""
        self._taken += size
        self._takers += 1

    def give_back(self, size: int) -> None:
        self._taken -= size
        self._takers -= 1
