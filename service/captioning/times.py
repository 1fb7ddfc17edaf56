"""Records where the time of a caption goes, while it goes: for its reply, its log line and the spans of a trace."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snapcap.service.telemetry.tracing import Span

if TYPE_CHECKING:
    from snapcap.service.engine.request import Completion
    from snapcap.service.images.decoder import DecodedImage


class CaptionTimes:
    """Moments of `time.monotonic`, and seconds; 0 is what has not come yet. A caption that fails has what was known
    by then. `admitted`: the device has been given the image. No dataclass: to make one takes a millisecond, before
    /livez."""

    __slots__ = ("admitted", "decode_s", "encode_s", "image_began", "image_s", "queue_s", "started", "tokens")

    def __init__(self, started: float | None = None) -> None:
        """`started` None: now."""
        self.started = time.monotonic() if started is None else started
        self.image_began = self.image_s = self.admitted = 0.0
        self.queue_s = self.encode_s = self.decode_s = 0.0
        self.tokens = 0

    def image_decoded(self, image: "DecodedImage") -> None:
        self.image_began, self.image_s = image.began, image.seconds

    def completed(self, completion: "Completion") -> None:
        self.queue_s, self.encode_s, self.decode_s = completion.queue_s, completion.encode_s, completion.decode_s
        self.tokens = len(completion.tokens)

    def waited_s(self, now: float) -> float:
        """Seconds in which nothing was done for it, until `now` if it still waits: first for who decodes images,
        then for the device."""
        if not self.image_began:
            return now - self.started
        return max(self.image_began - self.started, 0.0) + self._queued_s(now)

    def milliseconds(self, now: float) -> dict[str, float]:
        """The timings of a reply that is complete at `now`."""
        return {
            "queue": _ms(self.waited_s(now)),
            "decode_image": _ms(self.image_s),
            "encode": _ms(self.encode_s),
            "decode": _ms(self.decode_s),
            "total": _ms(now - self.started),
        }

    def spans(self, now: float) -> Iterator[Span]:
        """Yields the finished phases of the request: name, begin and end, none after `now`."""
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
        """Seconds between the image's decoding and the device, as the engine has them once it is through."""
        if self.encode_s:
            return self.queue_s
        return max((self.admitted or now) - self.image_began - self.image_s, 0.0)


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)
