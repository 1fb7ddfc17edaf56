"""Binds the listening socket before anything else happens; imports nothing but `socket`."""

import socket

_BACKLOG = 2048
# Of each connection, in the kernel, which counts them to the container and doubles them for its own use. Left to
# itself it would grow them to megabytes for a client whose bytes nobody reads yet.
RECEIVE_BUFFER = 128 << 10
SEND_BUFFER = 64 << 10


class BindError(OSError):
    """One line that names the address and says what to do."""


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A listening socket: connections wait in its backlog until the application is there.

    Raises BindError, which names the `option` that chooses the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise BindError(f"cannot listen on {host}:{port}: {reason}; choose with --host and {option}") from None
    return listener
