"""Fields of requests, in every API: those that change no caption are ignored and named, the others refused."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.servers.good_requests import APIS, PATHS, good_request, options_of

from snapcap.service.api.ollama import IGNORED_OPTIONS
from snapcap.service.captioning.options import MAX_UNKNOWN, NAMES, NEUTRAL, sort_fields
from snapcap.service.errors import InvalidOption

Png = Callable[..., bytes]
Ask = Callable[..., Any]
# What clients send beside the fields that are read here: OpenAI's own, those of routers, and of other servers.
UNKNOWN = """
reasoning_effort verbosity prompt_cache_key prompt_cache_retention safety_identifier service_tier
store parallel_tool_calls tools functions web_search_options prediction audio thinking
enable_thinking reasoning include_reasoning chat_template_kwargs chat_template add_generation_prompt
continue_final_message mm_processor_kwargs documents priority request_id cache_salt return_token_ids
kv_transfer_params provider transforms models route plugins usage keep_alive options format think
template raw session_id chat_id id user_id drop_params num_retries max_retries fallbacks caching
cache_prompt id_slot n_keep samplers timings_per_token reasoning_format return_progress model_id
use_cache wait_for_model return_full_text details watermark content_type sequence_id cache_control
name language size quality style tags task_id prompt_id prompt_version topic background include
instructions input previous_response_id truncation text conversation utm_source _
""".split()  # noqa: SIM905 - a list of so many would be as many lines


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ask(client: TestClient, api: str, image: Png) -> Ask:
    """``ask(**fields)``: the reply to a good request with these fields where the API has its options."""

    def post(**fields: Any) -> Any:
        document = good_request(api, image(9))
        options_of(api, document).update(fields)
        # Surrogates too, which JSON can spell.
        return client.post(PATHS[api], content=json.dumps(document), headers={"Content-Type": "application/json"})

    return post


def named(reply: Any) -> list[str]:
    """Names that the reply says were ignored."""
    assert reply.status_code == 200, reply.text
    assert "9 7" in reply.text
    header = reply.headers.get("x-snapcap-ignored", "")
    return header.split(", ") if header else []


def test_fields_that_change_no_caption_are_ignored_and_named(ask: Ask) -> None:
    fields = {"reasoning_effort": "low", "prompt_cache_retention": "24h", "store": True, "tools": [{"type": "x"}]}
    assert named(ask(**fields)) == list(fields)
    assert named(ask(max_retries=2, max_new_tokens=5)) == ["max_retries"]


def test_fields_at_the_top_of_a_document_too(client: TestClient, api: str, image: Png) -> None:
    for value in ({"use_cache": True}, True, 1, "x", [1]):
        document = {**good_request(api, image(9)), "settings": value}
        assert named(client.post(PATHS[api], json=document)) == ["settings"]
    reply = client.post(PATHS[api], json={**good_request(api, image(9)), "num_beam": 2})
    assert (reply.status_code, "did you mean num_beams?" in reply.text) == (422, True)


def test_nothing_that_clients_send_is_taken_for_a_mistake() -> None:
    for name in UNKNOWN:
        fields = sort_fields([(name, "x")], NAMES, (*NAMES, "max_tokens", "max_completion_tokens", "stop"))
        assert fields.ignored == (name,)


def test_a_null_is_as_good_as_no_field(ask: Ask) -> None:
    nulls = dict.fromkeys(("num_beam", "n", "tool_choice", "logit_bias", "response_format", "seed", "prompt", "x"))
    assert named(ask(**nulls)) == []


def test_a_field_that_would_change_the_caption_is_refused_unless_its_value_does_not(ask: Ask, api: str) -> None:
    elsewhere = ("do_sample", "max_length", *(IGNORED_OPTIONS if api == "ollama" else ()))
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values and name not in elsewhere}
    assert named(ask(**neutral)) == []
    assert named(ask(logit_bias={}, stop_sequences=[], images=[], json_schema="")) == []
    for name, value in {
        "n": 2,
        "num_return_sequences": True,
        "logprobs": True,
        "frequency_penalty": 0.5,
        "min_p": 0.1,
        "response_format": {"type": "grammar"},
        "modalities": ["text", "audio"],
        "tool_choice": "required",
        "logit_bias": {"5": 1},
        "guided_choice": ["a"],
        "images": ["aGVsbG8="],
        "stop_strings": ["a"],
        "force_words_ids": [[3]],
        "encoder_no_repeat_ngram_size": 2,
    }.items():
        reply = ask(**{name: value})
        if name in elsewhere:
            assert named(reply) == [name]
        else:
            assert (reply.status_code, f"'{name}' is not supported" in reply.text) == (422, True)


def test_a_field_that_only_a_checkpoint_may_set_is_refused_with_that(ask: Ask) -> None:
    for name, value in {
        "suppress_tokens": [3],
        "bad_words_ids": [[3]],
        "forced_eos_token_id": 3,
        "renormalize_logits": True,
    }.items():
        reply = ask(**{name: value})
        assert (reply.status_code, f"'{name}' is not supported" in reply.text) == (422, True)
        assert "holds for all requests where the model's generation_config.json sets it" in reply.text


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("num_beam", "num_beams"),
        ("numBeams", "num_beams"),
        ("beams", "num_beams"),
        ("Temperature", "temperature"),
        ("promt", "prompt"),
        ("max_new_token", "max_new_tokens"),
        ("repetition_penality", "repetition_penalty"),
        ("no_repeat_ngram", "no_repeat_ngram_size"),
        ("topk", "top_k"),
        ("sede", "seed"),
    ],
)
def test_a_name_that_is_nearly_an_option_is_refused_with_it(ask: Ask, wrong: str, meant: str) -> None:
    reply = ask(**{wrong: 2})
    assert reply.status_code == 422
    assert f"There is no option '{wrong}'; did you mean {meant}" in reply.text


def test_what_lists_the_options_lists_the_near_ones_where_there_are_many(client: TestClient, image: Png) -> None:
    reply = client.post(PATHS["openai"], json={**good_request("openai", image()), "max_token": 5})
    assert reply.json()["error"]["message"] == (
        "There is no option 'max_token'; did you mean max_tokens? The reference at /openapi.json lists the options."
    )


def test_names_cannot_break_the_header_and_are_bounded(ask: Ask) -> None:
    evil = {"a\r\nX-Evil: 1": 1, "b, c": 1, "é\0\ud800": 1, "x" * 5_000: 1, "": 1}
    reply = ask(**evil)
    assert named(reply) == ["a??X-Evil??1", "b??c", "???", "x" * 64, "?"]
    assert "x-evil" not in reply.headers
    many = named(ask(**{f"unknown{number}z": number for number in range(MAX_UNKNOWN)}))
    assert many == [*(f"unknown{number}z" for number in range(16)), "and 48 more"]
    refused = ask(**{f"unknown{number}z": number for number in range(MAX_UNKNOWN + 1)})
    assert (refused.status_code, "64 other fields are unknown already" in refused.text) == (422, True)
    with pytest.raises(InvalidOption):
        sort_fields(((f"unknown{number}z", "") for number in range(10**9)), ())


@pytest.mark.parametrize("value", [-1, -1.0])
def test_minus_one_is_not_given(ask: Ask, engine, value: float) -> None:
    assert named(ask(max_new_tokens=value, seed=value, top_k=value)) == []
    params = engine.requests[-1].params
    assert (params.max_new_tokens, params.top_k, params.seed) == (None, 0, None)
    for name in ("max_new_tokens", "top_k"):
        assert ask(**{name: -2}).status_code == 422
    for name in ("temperature", "num_beams", "no_repeat_ngram_size"):
        assert ask(**{name: value}).status_code == 422


@pytest.mark.parametrize("seed", [-2, -(2**63), 2**63, 2**64 - 1, 5.0])
def test_any_64_bits_are_a_seed(ask: Ask, engine, seed: float) -> None:
    assert named(ask(seed=seed, temperature=1)) == []
    assert engine.requests[-1].params.seed == seed


@pytest.mark.parametrize("length", [65_537, 128_000, 2**31 - 1])
def test_a_greater_length_than_the_models_is_as_the_docs_say(
    client: TestClient, api: str, ask: Ask, length: int
) -> None:
    """Chat clients send the length of other models."""
    reply = ask(max_new_tokens=length)
    if api in ("openai", "huggingface", "ollama", "responses"):
        assert named(reply) == []
    else:
        assert (reply.status_code, "the model can hold no more" in reply.text) == (422, True)


def test_an_option_of_one_api_is_not_passed_over_in_another(client: TestClient, image: Png) -> None:
    fields = {"do_sample": True, "max_length": 5, "stop": ["a"], "max_tokens": 5, "max_completion_tokens": 5}
    chats = ("stop", "max_tokens", "max_completion_tokens")
    reads = {"huggingface": ("do_sample", "max_length"), "ollama": ("stop",), "openai": chats, "responses": chats}
    for api, name in product(APIS, fields):
        document = good_request(api, image(9))
        options_of(api, document)[name] = fields[name]
        expected = 200 if name in reads.get(api, ()) else 422
        assert client.post(PATHS[api], json=document).status_code == expected, (api, name)


@pytest.mark.parametrize(
    ("api", "name", "within"), [("huggingface", "max_length", "parameters"), ("ollama", "num_predict", "options")]
)
def test_an_option_beside_its_member_is_told_its_place(
    client: TestClient, image: Png, api: str, name: str, within: str
) -> None:
    """Another API refuses a field of this name; a value that changes nothing there is passed over here too."""
    document = good_request(api, image(9))
    assert client.post(PATHS[api], json={**document, name: -1}).status_code == 200
    refused = client.post(PATHS[api], json={**document, name: 5})
    assert (refused.status_code, f"put it into {within}" in refused.text) == (422, True)


def test_queries_and_forms(client: TestClient, image: Png, engine) -> None:
    query = "utm_source=x&max_new_tokens=-1&n=1&seed=-1&unknown=&top_p="
    assert named(client.post(f"/v1/caption?{query}", content=image(9))) == ["utm_source"]
    assert (engine.requests[-1].params.max_new_tokens, engine.requests[-1].params.seed) == (None, None)
    assert named(client.post("/v1/caption?top_k=3.0&seed=%205%20&temperature=1.", content=image(9))) == []
    params = engine.requests[-1].params
    assert (params.top_k, params.seed, params.temperature) == (3, 5, 1.0)
    for wrong in ("3.5", "3,0", "3 0", "0x3", "null", "٣"):
        assert client.post("/v1/caption", params={"top_k": wrong}, content=image(9)).status_code == 422
    files = {"image": ("a.png", image(9))}
    for path in ("/v1/caption", "/v1/captions"):
        reply = client.post(f"{path}?_=1", files=files, data={"csrf_token": "x", "top_k": "3"})
        assert named(reply) == ["_", "csrf_token"]
        assert engine.requests[-1].params.top_k == 3
        for wrong in ({"num_beam": "2"}, {"n": "2"}):
            assert client.post(path, files=files, data=wrong).status_code == 422
            assert client.post(path, files=files, params=wrong).status_code == 422


def test_options_of_hugging_faces_pipelines(client: TestClient, image: Png, engine) -> None:
    def ask(**parameters: Any) -> Any:
        document = {**good_request("huggingface", image(9)), "parameters": parameters}
        return client.post("/", json=document)

    fields = {"use_cache": True, "num_return_sequences": 1, "num_beam_groups": 1, "max_length": 50}
    assert named(ask(**fields)) == ["use_cache"]
    # transformers counts the token that a caption starts with.
    assert engine.requests[-1].params.max_new_tokens == 49
    for nested in ("generation_parameters", "generate_kwargs"):
        generation = {"use_cache": False, "epsilon_cutoff": 0, "typical_p": 1.0, "top_k": None, "max_length": 1}
        assert named(ask(**{nested: generation})) == ["use_cache"]
        assert engine.requests[-1].params.max_new_tokens == 1
    for fields, tokens in (
        ({"max_length": 9, "max_new_tokens": 3}, 3),
        ({"max_length": -1}, None),
        ({"max_length": None, "max_new_tokens": -1}, None),
    ):
        assert named(ask(**fields)) == []
        assert engine.requests[-1].params.max_new_tokens == tokens
    for wrong in (0, "9", 1.5, True, 10**10):
        refused = ask(max_length=wrong)
        assert (refused.status_code, "'max_length' must be a whole number" in refused.text) == (422, True)
    assert ask(num_beam_groups=2).status_code == 422


def test_parameters_of_tritons_tensors(client: TestClient, image: Png) -> None:
    document = good_request("v2", image(9))
    (tensor,) = document["inputs"]
    tensor["parameters"] = {"content_type": "base64", "binary_data_size": None}
    tensor["unknown"] = 1
    output = {"name": "caption", "parameters": {"binary_data": None, "content_type": "str", "classification": 0}}
    more = {"parameters": {"priority": 3, "content_type": "np", "binary_data_output": None}, "outputs": [output]}
    assert named(client.post(PATHS["v2"], json={**document, **more})) == ["priority", "content_type"]
    for wrong in ({"classification": 2}, {"shared_memory_region": "r"}, {"binary_dat": False}):
        output["parameters"] = wrong  # type: ignore[assignment]
        assert client.post(PATHS["v2"], json={**document, **more}).status_code == 422


@pytest.mark.parametrize("below", ["", "/versions/1"])
@pytest.mark.parametrize(
    "end",
    ["config", "stats", "generate", "generate_stream", "trace/setting", "load", "unload", "nothing", "nothing/at"],
)
def test_what_triton_has_and_this_server_has_not_is_not_there(client: TestClient, below: str, end: str) -> None:
    path = f"/v2/models/fake{below}/{end}"
    reply = client.get(path)
    assert (reply.status_code, f"There is nothing at {path}" in reply.json()["error"]) == (404, True)
    if "nothing" not in end:
        reply = client.post(path, json={})
        assert (reply.status_code, f"There is nothing at {path}" in reply.json()["error"]) == (404, True)
    assert "is not served here; use 'fake'" in client.get("/v2/models/faker").json()["error"]
