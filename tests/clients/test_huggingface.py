"""`huggingface_hub.InferenceClient` against a real server."""

import base64
import json
from pathlib import Path

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from support.servers.server_process import ServerProcess


def test_bytes_and_paths(url: str, samples: dict[Path, str]) -> None:
    client = InferenceClient(model=url)
    for image, caption in samples.items():
        assert client.image_to_text(image.read_bytes()).generated_text == caption
        assert client.image_to_text(str(image)).generated_text == caption


def test_a_model_with_a_slash_in_its_name(url: str, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    assert InferenceClient(model=f"{url}/models/{model}").image_to_text(image).generated_text == caption


def test_a_model_that_is_not_served(url: str, model: str, sample: tuple[Path, str]) -> None:
    with pytest.raises(HfHubHTTPError) as failed:
        InferenceClient(model=f"{url}/models/org/other").image_to_text(sample[0])
    assert failed.value.response.status_code == 404
    assert failed.value.response.json() == {"error": f"The model 'org/other' is not served here; use {model!r}."}


def test_an_image_that_is_none_is_named_in_the_exception(url: str) -> None:
    with pytest.raises(HfHubHTTPError, match="image") as failed:
        InferenceClient(model=url).image_to_text(b"no image")
    assert failed.value.response.status_code == 422
    assert list(failed.value.response.json()) == ["error"]


def infer(server: ServerProcess, body: object) -> tuple[int, object]:
    message = json.dumps(body).encode()
    status, reply, _ = server.call("/", message, {"Content-Type": "application/json"})
    return status, reply


def test_json_with_parameters(server: ServerProcess, sample: tuple[Path, str]) -> None:
    image, caption = sample
    inputs = base64.b64encode(image.read_bytes()).decode()
    assert infer(server, {"inputs": inputs}) == (200, [{"generated_text": caption}])
    short = infer(server, {"inputs": inputs, "parameters": {"max_new_tokens": 3}})
    assert short == (200, [{"generated_text": " ".join(caption.split()[:3])}])
    # A bound above what the model holds is no mistake in this API.
    assert infer(server, {"inputs": inputs, "parameters": {"max_new_tokens": 1000}})[0] == 200
    greedy = {"generation_parameters": {"do_sample": False, "temperature": 2.0, "num_beams": 1}}
    assert infer(server, {"inputs": inputs, "parameters": greedy}) == (200, [{"generated_text": caption}])
    beams = {"generate_kwargs": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}}
    assert infer(server, {"inputs": inputs, "parameters": beams}) == (200, [{"generated_text": caption}])
    sampled = {"generate_kwargs": {"do_sample": True, "temperature": 2.0, "seed": 3}, "prompt": "a large"}
    first, again = (infer(server, {"inputs": inputs, "parameters": sampled}) for _ in range(2))
    assert first == again
    assert first[1][0]["generated_text"].startswith("a large")  # type: ignore[index]


def test_the_chat_client_that_knows_an_address_alone(url: str, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    uri = f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]
    reply = InferenceClient(url).chat_completion(messages, max_tokens=20, tools=[], stop=[], n=1)
    assert (reply.choices[0].message.content, reply.model) == (caption, model)


def test_the_chat_client_asks_for_a_type_of_the_program(url: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    uri = f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]
    schema = {"type": "object", "properties": {"alt_text": {"type": "string"}}, "required": ["alt_text"]}
    # The client sends the first form as a `json_object` with the schema in `value`; its documents show the second.
    by_schema = {"type": "json_schema", "json_schema": {"name": "alt", "schema": schema}}
    for form in (by_schema, {"type": "json", "value": schema}):
        reply = InferenceClient(url).chat_completion(messages, response_format=form)  # type: ignore[arg-type]
        assert json.loads(reply.choices[0].message.content or "") == {"alt_text": caption}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 422, "inputs is missing"),
        ({"inputs": "no base64!"}, 422, "inputs must be base64"),
        ({"inputs": "aa==", "beams": 1}, 422, "'beams' here; did you mean num_beams? The options in parameters"),
        ({"inputs": "aa==", "parameters": {"beams": 1}}, 422, "'beams'"),
        ({"inputs": "aa==", "parameters": {"num_beams": 9}}, 422, "from 1 to 8"),
        ({"inputs": "aa==", "parameters": {"do_sample": 1}}, 422, "true or false"),
        ({"inputs": "aa==", "parameters": {"top_k": 1, "generate_kwargs": {"top_k": 2}}}, 422, "'top_k' must be"),
        ({"inputs": "aa==", "parameters": [5]}, 422, "'parameters' must be an object"),
        ([], 400, "must be a JSON object"),
    ],
)
def test_bad_json_is_one_sentence(server: ServerProcess, body: object, status: int, says: str) -> None:
    got, reply = infer(server, body)
    assert got == status
    assert isinstance(reply, dict)
    assert list(reply) == ["error"]
    assert says in reply["error"]
