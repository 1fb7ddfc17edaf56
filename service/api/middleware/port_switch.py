"""Routes each request to one of two applications by the port that it came to."""

from starlette.types import ASGIApp, Receive, Scope, Send


class PortSwitch:
    """ASGI application: what came to `port` is for `there`, the rest for `elsewhere`."""

    def __init__(self, port: int, there: ASGIApp, elsewhere: ASGIApp) -> None:
        self._port = port
        self._there = there
        self._elsewhere = elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The server's end of the connection, whatever the client says in Host.
        here = scope.get("server") or (None, None)
        app = self._there if here[1] == self._port else self._elsewhere
        await app(scope, receive, send)
