"""A server that asks for keys and has its metrics on a port of their own: probes, pages, every API's client."""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from support.servers.server_process import ServerProcess, reserved_port
from tritonclient.utils import InferenceServerException

KEYS = ("first-key.0123", "second~key/+==")


@dataclass(frozen=True)
class Guarded:
    process: ServerProcess
    metrics_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.port}"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, compiled_options: tuple[str, ...]) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys"
    keys.write_text(f"# the team\n{KEYS[0]}\n\n  {KEYS[1]}  \n")
    keys.chmod(0o644)
    with reserved_port() as metrics:
        port = metrics.getsockname()[1]
        options = (*compiled_options, "--metrics-port", str(port))
        with ServerProcess(*options, "--api-key-file", str(keys)) as process:
            yield Guarded(process.wait_ready(), port)


def chat(image: Path) -> list[Any]:
    url = f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


@pytest.mark.parametrize("key", KEYS)
def test_every_client_shows_its_key(guarded: Guarded, samples: dict[Path, str], key: str) -> None:
    image, caption = next(iter(samples.items()))
    hub = InferenceClient(model=guarded.url, token=key)
    assert hub.image_to_text(image).generated_text == caption
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key) as client:
        stream = client.chat.completions.create(model="demo", messages=chat(image), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == caption
    with ollama.Client(guarded.url, headers={"Authorization": f"Bearer {key}"}) as asking:
        assert asking.generate("demo", images=[image.read_bytes()]).response == caption
    v2 = triton.InferenceServerClient(guarded.url.removeprefix("http://"))
    tensor = triton.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([image.read_bytes()], dtype=np.object_))
    result = v2.infer("demo", [tensor], headers={"Authorization": f"Bearer {key}"})
    assert result.as_numpy("caption")[0].decode() == caption
    v2.close()


@pytest.mark.parametrize("key", ["wrong", f"{KEYS[0]}x", KEYS[0][:-1], KEYS[0].upper()])
def test_every_client_is_told_in_its_own_words_that_the_key_is_wrong(
    guarded: Guarded, samples: dict[Path, str], key: str
) -> None:
    image = next(iter(samples))
    with pytest.raises(HfHubHTTPError, match="The API key is not valid") as hub:
        InferenceClient(model=guarded.url, token=key).image_to_text(image)
    assert hub.value.response.status_code == 401
    assert hub.value.response.headers["www-authenticate"] == 'Bearer realm="snapcap", error="invalid_token"'
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert (refused.value.code, refused.value.type) == ("invalid_api_key", "invalid_request_error")
    with (
        ollama.Client(guarded.url, headers={"Authorization": f"Bearer {key}"}) as asking,
        pytest.raises(ollama.ResponseError, match="The API key is not valid") as unknown,
    ):
        asking.list()
    assert unknown.value.status_code == 401
    v2 = triton.InferenceServerClient(guarded.url.removeprefix("http://"))
    with pytest.raises(InferenceServerException, match="not valid") as denied:
        v2.get_server_metadata(headers={"Authorization": f"Bearer {key}"})
    assert denied.value.status() == "401"
    v2.close()


def test_without_a_key_nothing_is_read_and_nothing_told(guarded: Guarded) -> None:
    for path, body in (
        ("/v1/caption", b"x"),
        ("/api/generate", b"x"),
        ("/api/tags", None),
        ("/startup", None),
        ("/metrics", None),
        ("/nowhere", None),
        ("/", b"x"),
    ):
        status, reply, headers = guarded.process.call(path, body)
        assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="snapcap"')
        assert "send one as `Authorization: Bearer KEY`" in reply["error"]
        assert "x-request-id" in headers
    status, reply, _ = guarded.process.call("/v1/chat/completions", b"x")
    assert (status, reply["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("value", [f"Basic {KEYS[0]}", KEYS[0], "Bearer", "Bearer "])
def test_what_is_no_bearer_token(guarded: Guarded, value: str) -> None:
    assert guarded.process.call("/startup", None, {"Authorization": value})[0] == 401


def test_the_scheme_may_be_written_in_any_case(guarded: Guarded) -> None:
    assert guarded.process.call("/startup", None, {"Authorization": f"bEARER {KEYS[0]}"})[0] == 200


PROBES = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/demo/ready")


@pytest.mark.parametrize("path", [*PROBES, "/v2/models/demo/versions/1/ready", "/", "/docs"])
def test_probes_and_pages_need_no_key(guarded: Guarded, path: str) -> None:
    assert guarded.process.call(path)[0] == 200
    assert guarded.process.call(path, b"x")[0] == 401
    v2 = triton.InferenceServerClient(guarded.url.removeprefix("http://"))
    assert v2.is_server_ready()
    assert v2.is_model_ready("demo")
    v2.close()


def test_schemathesis_finds_no_route_that_ignores_the_key(
    guarded: Guarded, schemathesis: Callable[..., None]
) -> None:
    key = f"Authorization: Bearer {KEYS[0]}"
    checks = "ignored_auth,status_code_conformance,response_headers_conformance,response_schema_conformance"
    schemathesis(guarded.url, "--header", key, "--checks", checks, "--phases", "fuzzing", "--max-examples", "3")


def test_metrics_are_on_their_own_port_only_and_need_no_key_there(guarded: Guarded) -> None:
    own = ServerProcess()
    own.port = guarded.metrics_port
    status, text, headers = own.call("/metrics")
    assert (status, "x-request-id" in headers) == (200, True)
    assert 'snapcap_requests_total{api="v2_health",code="200"}' in text
    assert "snapcap_ready 1.0" in text
    for path in ("/livez", "/v1/models", "/", "/openapi.json"):
        assert own.call(path)[0] == 404
    assert own.call("/metrics", b"x")[0] == 405
    authorized = {"Authorization": f"Bearer {KEYS[0]}"}
    assert guarded.process.call("/metrics", None, authorized)[0] == 404
    assert "/metrics" not in guarded.process.call("/openapi.json")[1]["paths"]


def test_keys_that_everybody_may_read_are_warned_of_and_never_logged(guarded: Guarded) -> None:
    log = guarded.process.log()
    assert "everybody may read the API keys" in log
    assert not any(key in log for key in KEYS)
