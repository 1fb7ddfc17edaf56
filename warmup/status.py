"""What the start has reached, for `/startup` and the metrics: backend, buckets, artifacts. No torch."""

import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

BucketState = Literal["pending", "eager", "warm", "captured", "failed"]


@dataclass(frozen=True)
class BucketStatus:
    """One bucket of one component; ``seconds`` is how long its warm-up took."""

    component: Literal["encoder", "decoder"]
    size: int
    state: BucketState = "pending"
    backend: str = ""
    seconds: float | None = None


@dataclass
class _State:
    backend: str | None = None
    device: str | None = None
    dtype: str | None = None
    error: str | None = None
    buckets: dict[tuple[str, int], BucketStatus] = field(default_factory=dict)


class StartupStatus:
    """Thread-safe: the device thread writes, HTTP and metrics read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = _State()

    @property
    def backend(self) -> str | None:
        """The backend that serves, once it is known."""
        return self._state.backend

    @property
    def error(self) -> str | None:
        return self._state.error

    def serve_with(self, backend: str, device: str, dtype: str) -> None:
        with self._lock:
            self._state.backend, self._state.device, self._state.dtype = backend, device, dtype

    def fail(self, error: str) -> None:
        with self._lock:
            self._state.error = error

    def expect(self, sizes: tuple[int, ...]) -> None:
        """Every bucket of both components, pending."""
        with self._lock:
            for component in ("encoder", "decoder"):
                for size in sizes:
                    self._state.buckets[component, size] = BucketStatus(component, size)

    def update(
        self,
        component: Literal["encoder", "decoder"],
        size: int,
        state: BucketState,
        backend: str,
        seconds: float | None = None,
    ) -> None:
        with self._lock:
            known = self._state.buckets.get((component, size), BucketStatus(component, size))
            self._state.buckets[component, size] = replace(
                known, state=state, backend=backend, seconds=known.seconds if seconds is None else seconds
            )

    def decoder_backend(self, size: int) -> str:
        """The backend that runs the decode step of this bucket."""
        return self._state.buckets["decoder", size].backend

    def buckets(self) -> list[BucketStatus]:
        """Encoder first, ascending sizes."""
        with self._lock:
            buckets = self._state.buckets.values()
            return sorted(buckets, key=lambda b: (b.component != "encoder", b.size))

    def to_dict(self) -> dict[str, Any]:
        """The part of `/startup` that is not the timeline."""
        state = self._state
        return {
            "backend": state.backend,
            "device": state.device,
            "dtype": state.dtype,
            "error": state.error,
            "buckets": [asdict(bucket) for bucket in self.buckets()],
        }
