"""Records how long each phase of a caption takes, for the reply, the log line and the trace's spans."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snapcap.service.telemetry.tracing import Span

if TYPE_CHECKING:
    from snapcap.service.engine.request import Completion
    from snapcap.service.images.decode import DecodedImage


class CaptionTimes:
    """Holds moments of `time.monotonic` and durations in seconds; 0 means not known yet. A failed caption keeps
    the times known until then. `admitted` is the moment when the device got the image. `wake_s`: how long the
    request waited for an absent model to be ready.

    This is no dataclass, because making a dataclass takes a millisecond and /livez waits for this module.
    """

    __slots__ = (
        *("admitted", "decode_s", "encode_s", "image_began", "image_s", "queue_s", "started", "tokens", "wake_s"),
    )

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.image_began = self.image_s = self.admitted = 0.0
        self.queue_s = self.encode_s = self.decode_s = self.wake_s = 0.0
        self.tokens = 0

    def image_decoded(self, image: "DecodedImage") -> None:
        self.image_began, self.image_s = image.began, image.seconds

    def completed(self, completion: "Completion") -> None:
        self.queue_s, self.encode_s, self.decode_s = completion.queue_s, completion.encode_s, completion.decode_s
        self.tokens = len(completion.tokens)

    def waited_s(self, now: float) -> float:
        """Returns the seconds that the request has waited up to `now`, for an image decoder and for the device."""
        if not self.image_began:
            return now - self.started
        return max(self.image_began - self.started, 0.0) + self._queued_s(now)

    def milliseconds(self, now: float) -> dict[str, float]:
        """Returns the timings of a reply that is complete at `now`, in milliseconds."""
        return {
            "queue": _ms(self.waited_s(now)),
            "decode_image": _ms(self.image_s),
            "encode": _ms(self.encode_s),
            "decode": _ms(self.decode_s),
            "total": _ms(now - self.started),
        }

    def spans(self, now: float) -> Iterator[Span]:
        """Yields each phase of the request that has ended, as name, begin and end. No end is later than `now`."""
        if not self.image_began:
            return
        seconds = {
            "decode image": self.image_s,
            "queue": self._queued_s(now),
            "encode": self.encode_s,
            "decode": self.decode_s,
        }
        began = self.image_began
        for name, lasted in seconds.items():
            end = min(began + lasted, now)
            if lasted or name == "queue":
                yield name, began, end
            began = end

    def _queued_s(self, now: float) -> float:
        """Returns the seconds between decoding and the device. A completed request has them from the engine."""
        if self.encode_s:
            return self.queue_s
        return max((self.admitted or now) - self.image_began - self.image_s, 0.0)


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)
