"""Every route held to what the OpenAPI document says of it, with generated requests: good ones and bad ones."""

from collections.abc import Callable

from support.servers.server_process import ServerProcess


def test_schemathesis_finds_nothing(server: ServerProcess, url: str, schemathesis: Callable[..., None]) -> None:
    schemathesis(url, "--max-examples", "10")
    assert server.process.poll() is None
    assert server.metrics()["snapcap_requests_in_flight"] == 0
    assert not any('code="500"' in name for name in server.metrics())
    assert "Traceback" not in server.log()
