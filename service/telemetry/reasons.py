"""Names the reasons by which metrics count closed connections and killed decode processes.

The metrics and what kills decode processes both import it, and it imports nothing.
"""

from typing import Literal, get_args

# For which the server ends a decode process.
Why = Literal["deadline", "too_complex", "client_left", "hung", "bad_answer"]
WHYS: tuple[Why, ...] = get_args(Why)
# Of these the image is tried again: it was not what was wrong.
TRIED_AGAIN: tuple[Why, ...] = ("hung", "bad_answer")
# In the words of the log.
SENTENCES: dict[Why, str] = {
    "deadline": "killed at the deadline of its request",
    "too_complex": "killed: its image takes longer to decode than any may",
    "client_left": "killed: its client has left",
    "hung": "killed: it had an image and did nothing",
    "bad_answer": "killed: it said what no decode process says",
}
# For which a connection is refused, or closed for what its client does.
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
