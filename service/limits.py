"""Defines every refusal of a request that meets a limit of the server: 413, 429, 431 and 503.

Each entry of `LIMITS` names the bounded quantity, the option that sets the limit, the error of a refusal, with its
status and code, and the metric. `python tests/support/documents/tables.py docs/security.md` writes the table of
limits in the documentation from `LIMITS`. The reply, the log line and the metric of a 429 contain its code, and
each such code has one entry.

`errors.py` defines `PayloadTooLarge` and `NotReady`, which have several causes each.
"""

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import BadRequest, NotReady, Overloaded, PayloadTooLarge, ServiceError

# The limits that no option sets.
MAX_IMAGE_FETCHES = 64  # each uses one of the file descriptors that `server/http_process.py` reserves
ENGINE_CHANNEL_BYTES = 16 << 20  # in addition to the buffer of the socket; holds messages of thousands of requests
DECOMPRESSION_CPU_S = 1.0
JSON_STRUCTURE_BYTES = 128 << 10
JSON_STRING_BYTES = 2 << 20  # all strings of up to 64 KiB together; 16 small images in base64 fit
BINARY_HEADER_BYTES = 1 << 20
# The metrics, without the prefix and `_total`.
_REQUESTS, _CONNECTIONS = "requests_rejected", "http_connections_closed"


class QueueFull(Overloaded):
    """Refuses a request because the queue of images is full."""

    code = "queue_full"
    what = "The queue is full"


class BodyMemoryFull(Overloaded):
    """Refuses a body because the bodies of all requests together have reached their memory limit, `limit` bytes."""

    title = "Too much in flight"

    def __init__(self, limit: int) -> None:
        self.what = f"The bodies of all requests together have reached their limit of {limit} bytes"
        super().__init__()


class ImageFetchesFull(Overloaded):
    """Refuses an image URL because `MAX_IMAGE_FETCHES` images are being fetched already."""

    title = "Too many image URLs"
    what = f"The server is fetching {MAX_IMAGE_FETCHES} images from URLs already, which is its limit"


class EngineChannelFull(Overloaded):
    """Refuses a request because `ENGINE_CHANNEL_BYTES` of messages wait for the engine process to read them."""

    title = "Engine does not keep up"
    what = "The engine process does not keep up with its requests"


class TooManyConnections(Overloaded):
    """Refuses a connection because the maximum number of connections is open."""

    status = 503
    title = "Too many connections"
    what = "The server has no room for another connection"


class HeadTooLarge(BadRequest):
    """Refuses a request whose head has too many bytes or too many fields. `unit`: "bytes" or "fields"."""

    status = 431
    title = "Head too large"

    def __init__(self, limit: int, unit: str) -> None:
        super().__init__(f"The head of the request, trailers included, has more than {limit} {unit}; send fewer.")


class ImageMemoryFull(Overloaded):
    """Refuses a large image because the maximum number of large images already wait for memory."""

    title = "Too many large images"
    what = "Too many large images wait for memory to be decoded"


@dataclass(frozen=True)
class Limit:
    """Describes one limit. `error`: the refusal, with its status and code. `what`: the bounded quantity, in words.
    `bound`: the limit's value in words; "": the option's default. `option`: the server option that sets the limit;
    "": none. `reason`: the label of a refusal in the metric; "": the code."""

    error: type[ServiceError]
    what: str
    bound: str = ""
    option: str = ""
    metric: str = _REQUESTS
    reason: str = ""


# The limits of each status are in the order in which a request meets them.
LIMITS: tuple[Limit, ...] = (
    Limit(PayloadTooLarge, "bytes of a body, also when it is decompressed", option="max_body_bytes"),
    Limit(PayloadTooLarge, "CPU time for decompressing a body", f"{DECOMPRESSION_CPU_S:g} s"),
    Limit(
        PayloadTooLarge,
        "bytes of JSON outside of strings; bytes of all its strings of up to 64 KiB",
        f"{JSON_STRUCTURE_BYTES >> 10} KiB; {JSON_STRING_BYTES >> 20} MiB",
    ),
    Limit(PayloadTooLarge, "bytes of the JSON before binary tensor data", f"{BINARY_HEADER_BYTES >> 20} MiB"),
    Limit(
        QueueFull,
        "images in the queue, from their arrival until the device has them; if the queue is full, a request is "
        "refused before its body is read",
        option="queue_size",
    ),
    Limit(
        BodyMemoryFull,
        "bytes of all bodies together",
        "a sixteenth of the container's memory, at most 1 GiB",
        "max_body_memory",
    ),
    Limit(ImageMemoryFull, "large images that wait for memory to be decoded", "16", "decode_memory"),
    Limit(ImageFetchesFull, "images fetched from URLs at a time", f"{MAX_IMAGE_FETCHES}"),
    Limit(EngineChannelFull, "bytes that the engine process has yet to read", f"{ENGINE_CHANNEL_BYTES >> 20} MiB"),
    Limit(
        HeadTooLarge,
        "bytes of a head and its trailers; a URL that is too long gets 414",
        option="max_header_bytes",
        metric=_CONNECTIONS,
    ),
    Limit(HeadTooLarge, "fields of a head", option="max_headers", metric=_CONNECTIONS),
    Limit(
        TooManyConnections,
        "connections; a connection that is idle makes room first, and probes are answered",
        "one for each 4 MiB of memory, at most 4096, and no more than open files allow",
        "max_connections",
        _CONNECTIONS,
        "max_connections",
    ),
    Limit(NotReady, "the start, and the drain after SIGTERM", "until `/readyz` answers 200"),
    Limit(
        NotReady,
        "seconds without progress of the engine or the event loop; then the server ends",
        option="watchdog_timeout",
    ),
    Limit(NotReady, "beams of a search, if no batch of this size became ready", "the largest warm bucket"),
)
OVERLOADED = tuple(limit.error.code for limit in LIMITS if limit.error.status == 429)
# The codes of errors that end a request without a mistake in its content.
REJECTED = (
    *OVERLOADED,
    "not_ready",
    "deadline_exceeded",
    "client_disconnected",
    "payload_too_large",
    "body_timeout",
)
