"""Names the reasons by which metrics count closed connections and killed decode processes.

The metrics and the code that kills decode processes both import this module, which imports nothing of the project.
"""

from typing import Literal, get_args

# The reasons for which the server kills a decode process.
Why = Literal[
    "deadline", "too_complex", "client_left", "hung", "bad_answer", "broken", "idle", "threads", "refusals"
]
WHYS: tuple[Why, ...] = get_args(Why)
# For these reasons the image is decoded again, because the process was at fault and not the image.
TRIED_AGAIN: tuple[Why, ...] = ("hung", "bad_answer")
# The reasons as sentences of the log.
SENTENCES: dict[Why, str] = {
    "deadline": "killed at the deadline of its request",
    "too_complex": "killed: its image took more CPU time than --decode-timeout allows",
    "client_left": "killed: its client has left",
    "hung": "killed: it had an image to decode and made no progress",
    "broken": "killed: decoding failed in a way that no image should cause",
    "idle": "killed: it used CPU time or kept memory without an image",
    "threads": "killed: it started more threads than a codec needs",
    "refusals": "killed: after many refused images, a new process is to decode the server's own picture",
    "bad_answer": "killed: its answer was not one that a decode process may give",
}
# The reasons for which a connection is refused, or closed because of its client.
CLOSED = (
    "malformed",
    "head_too_large",
    "head_timeout",
    "body_left_over",
    "send_timeout",
    "max_connections",
    "made_room",
    "grace_period",
)
