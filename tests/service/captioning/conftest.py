"""A server whose queue has few places, and its clients."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.servers.bounded_server import BoundedServer
from support.servers.queue_places import PLACES

from snapcap.service.api.app import Services


@pytest.fixture
def tight(make_services, serve_with) -> Services:
    """Ready to caption, with two places."""
    return serve_with(make_services(queue_size=PLACES))


@pytest.fixture
def server(tight: Services) -> Iterator[BoundedServer]:
    with BoundedServer(tight) as server:
        yield server


@pytest.fixture
def clients(server: BoundedServer) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as exits:
        yield lambda: exits.enter_context(server.connect())
