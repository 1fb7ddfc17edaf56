"""`tritonclient.http` against a real server."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from support.servers.server_process import ServerProcess
from tritonclient.utils import InferenceServerException


@pytest.fixture
def client(url: str) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    yield client
    client.close()


def tensor(images: list[bytes], *, binary: bool = True, shape: list[int] | None = None) -> triton.InferInput:
    data = images if binary else [base64.b64encode(image) for image in images]
    array = np.array(data, dtype=np.object_).reshape(shape or [len(images)])
    return triton.InferInput("image", list(array.shape), "BYTES").set_data_from_numpy(array, binary_data=binary)


def captions(result: triton.InferResult) -> list[str]:
    return [each.decode() if isinstance(each, bytes) else each for each in result.as_numpy("caption").flatten()]


def test_health_and_metadata(client: triton.InferenceServerClient, model: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert client.is_model_ready(model, "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready(model, "2")
    server = client.get_server_metadata()
    assert (server["name"], server["extensions"]) == ("snapcap", ["binary_tensor_data"])
    metadata = client.get_model_metadata(model)
    assert metadata == client.get_model_metadata(model, "1")
    assert metadata["name"] == model
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert metadata["outputs"] == [{"name": "caption", "datatype": "BYTES", "shape": [-1]}]


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False, None])
def test_a_batch_as_binary_data_and_as_base64(
    client: triton.InferenceServerClient,
    model: str,
    samples: dict[Path, str],
    binary_input: bool,
    binary_output: bool | None,
) -> None:
    images = tensor([path.read_bytes() for path in samples], binary=binary_input)
    outputs = None
    if binary_output is not None:
        outputs = [triton.InferRequestedOutput("caption", binary_data=binary_output)]
    result = client.infer(model, [images], outputs=outputs, request_id="seven")
    assert captions(result) == list(samples.values())
    reply = result.get_response()
    assert (reply["id"], reply["model_name"], reply["model_version"]) == ("seven", model, "1")
    assert ("data" in reply["outputs"][0]) == (binary_output is False)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compressed_requests(
    client: triton.InferenceServerClient, model: str, samples: dict[Path, str], coding: str, binary: bool
) -> None:
    images = tensor([path.read_bytes() for path in samples], binary=binary)
    result = client.infer(
        model, [images], request_compression_algorithm=coding, response_compression_algorithm=coding
    )
    assert captions(result) == list(samples.values())


def test_the_output_has_the_shape_of_the_input(
    client: triton.InferenceServerClient, model: str, samples: dict[Path, str]
) -> None:
    images = tensor([path.read_bytes() for path in samples], shape=[len(samples), 1])
    assert client.infer(model, [images], model_version="1").as_numpy("caption").shape == (len(samples), 1)


def test_parameters(client: triton.InferenceServerClient, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    short = client.infer(model, [tensor([image.read_bytes()])], parameters={"max_new_tokens": 2})
    assert captions(short) == [" ".join(caption.split()[:2])]
    images, more = [tensor([image.read_bytes()])], {"content_type": "np"}
    assert captions(client.infer(model, images, priority=3, sequence_id=5, parameters=more)) == [caption]
    assert captions(client.infer(model, images, timeout=0)) == [caption]  # in Triton, 0 is no limit
    with pytest.raises(InferenceServerException, match="within the time limit") as late:
        client.infer(model, [tensor([image.read_bytes()])], timeout=1)  # a microsecond
    assert late.value.status() == "504"


def test_extensions_that_are_not_here(client: triton.InferenceServerClient, model: str) -> None:
    for call in (client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match="There is nothing at") as missing:
            call(model)
        assert missing.value.status() == "404"


def test_an_image_that_is_none_fails_the_batch(
    client: triton.InferenceServerClient, model: str, sample: tuple[Path, str]
) -> None:
    with pytest.raises(InferenceServerException) as failed:
        client.infer(model, [tensor([sample[0].read_bytes(), b"no image"])])
    assert failed.value.status() == "422"
    assert captions(client.infer(model, [tensor([sample[0].read_bytes()])])) == [sample[1]]


def test_errors_of_the_client_s_making(client: triton.InferenceServerClient, model: str) -> None:
    for name, version in (("other", ""), (model, "2")):
        with pytest.raises(InferenceServerException) as missing:
            client.infer(name, [tensor([b"x"])], model_version=version)
        assert missing.value.status() == "404"
    with pytest.raises(InferenceServerException, match="at most 16"):
        client.infer(model, [tensor([b"x"] * 17)])
    wrong = triton.InferInput("pixels", [1], "BYTES").set_data_from_numpy(np.array([b"x"], dtype=np.object_))
    with pytest.raises(InferenceServerException, match="must be 'image'"):
        client.infer(model, [wrong])


INPUT: dict[str, Any] = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aa=="]}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not JSON"),
        ({}, 422, "'inputs'"),
        ({"inputs": [INPUT, INPUT]}, 422, "a list of one tensor"),
        ({"inputs": [INPUT | {"datatype": "UINT8"}]}, 422, "BYTES"),
        ({"inputs": [INPUT | {"shape": [1, 2]}]}, 422, "[n, 1]"),
        ({"inputs": [INPUT | {"shape": [2]}]}, 422, "as many elements"),
        ({"inputs": [INPUT | {"shape": [0]}]}, 422, "[n, 1]"),
        ({"inputs": [INPUT | {"data": ["no!"]}]}, 422, "inputs[0].data[0]"),
        ({"inputs": [INPUT | {"data": []}]}, 422, "inputs[0].data"),
        ({"inputs": [INPUT | {"parameters": {"binary_data_size": 5}}]}, 422, "binary_data_size"),
        ({"inputs": [INPUT], "outputs": [{"name": "logits"}]}, 422, "'caption'"),
        ({"inputs": [INPUT], "parameters": {"beams": 3}}, 422, "'beams'"),
        ({"inputs": [INPUT], "parameters": {"timeout": 0.5}}, 422, "microseconds"),
        ({"inputs": [INPUT], "parameters": {"timeout": -1}}, 422, "microseconds"),
        ({"inputs": [INPUT], "id": "\n"}, 422, "'id'"),
    ],
    ids=str,
)
def test_bad_requests_are_one_sentence(
    server: ServerProcess, model: str, body: dict[str, Any] | bytes, status: int, says: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    got, reply, headers = server.call(f"/v2/models/{model}/infer", content)
    assert got == status
    assert list(reply) == ["error"]
    assert says in reply["error"]
    assert "x-request-id" in headers


@pytest.mark.parametrize("length", ["x", "-1", "9999999999"])
def test_a_header_length_that_is_none(server: ServerProcess, model: str, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    status, reply, _ = server.call(f"/v2/models/{model}/infer", b"{}", headers)
    assert (status, list(reply)) == (400, ["error"])


def test_binary_data_that_ends_too_early(server: ServerProcess, model: str) -> None:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    status, reply, _ = server.call(f"/v2/models/{model}/infer", head + b"\x09\0\0\0ab", headers)
    assert (status, "within an element" in reply["error"]) == (400, True)


def test_methods(server: ServerProcess, model: str) -> None:
    for path, allow in (("infer", "POST"), ("ready", "GET, HEAD"), ("versions/1", "GET, HEAD")):
        body = None if allow == "POST" else b"{}"
        status, reply, headers = server.call(f"/v2/models/{model}/{path}", body)
        assert (status, list(reply), headers["allow"]) == (405, ["error"], allow)
    status, reply, _ = server.call("/v2/nothing")
    assert (status, list(reply)) == (404, ["error"])
