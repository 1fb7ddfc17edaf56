"""Builds the whole application over services that a test holds in its hand, and serves it on a real port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from snapcap.service.api.app import Application, Services, create_operations_app
from snapcap.service.api.captioning_apis import add_captioning_apis
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.access import ApiKeys
from snapcap.service.http.bodies import BodyLimits

ANY_HOST = HttpSettings(hosts=("*",))


def create_app(
    services: Services, limits: BodyLimits, http: HttpSettings = ANY_HOST, keys: ApiKeys | None = None
) -> Application:
    """Returns an application with all routes, as it is once a server has imported them."""
    app = create_operations_app(services, http, keys)
    add_captioning_apis(app, services, limits)
    return app


@contextmanager
def on_a_port(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """Serves in a thread; yields the address. ``port`` 0 is any free one."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
