"""Serves the API of Hugging Face's inference servers: POST / and POST /models/{name}.

`huggingface_hub.InferenceClient` calls them. The image is the raw body, or base64 or a URL in JSON with parameters.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.service.api.answers import Answers
from snapcap.service.captioning.options import NAMES, CaptionOptions, options_from_json, sort_fields
from snapcap.service.errors import InvalidOption, MissingImage
from snapcap.service.http.bodies import (
    BodyLimits,
    image_or_url,
    json_object,
    member_object,
    read_image_or_json,
)
from snapcap.service.http.problems import SENTENCE
from snapcap.service.http.replies import JsonReply
from snapcap.service.http.routing import Api, RouteGroup

MAX_LENGTH = "max_length"
# Members in which clients and older pipelines nest the parameters of generation.
NESTED = ("generation_parameters", "generate_kwargs")
PARAMETERS = (*NAMES, "do_sample", MAX_LENGTH)


class HuggingFaceRoutes:
    """Serves the two endpoints of the API for one captioner."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def group(self) -> RouteGroup:
        routes = [
            Route("/", self.image_to_text, methods=["POST"]),
            Route("/models/{model:path}", self.image_to_text_of_model, methods=["POST"]),
        ]
        return RouteGroup("Hugging Face", routes, Api("huggingface", SENTENCE, captions=True))

    async def image_to_text(self, request: Request) -> Response:
        """The image is the body, or base64 or a URL in JSON with parameters."""
        return await self._caption(request)

    async def image_to_text_of_model(self, request: Request) -> Response:
        """Does the same as POST / with the model of this name. The name may contain slashes."""
        name = request.path_params["model"]
        self._answers.captioner.served(name)  # a model that does not exist is refused before the body is read
        return await self._caption(request, name)

    async def _caption(self, request: Request, model: str = "") -> Response:
        result, headers = await self._answers.caption(request, read_huggingface, model)
        return JsonReply([{"generated_text": result.caption}], headers)


async def read_huggingface(request: Request, limits: BodyLimits) -> tuple[bytes | str, CaptionOptions]:
    """Returns the image, or its URL, and the options of a request. Raises BadRequest."""
    found = await read_image_or_json(request, limits, parse_inputs)
    return (found, CaptionOptions(clamp=True)) if isinstance(found, bytes) else found


def parse_inputs(body: bytes) -> tuple[bytes | str, CaptionOptions]:
    """Parses `{"inputs": base64 or URL, "parameters": {…}}`. Raises BadRequest."""
    given = json_object(body, '{"inputs": "…base64…"}')
    fields = sort_fields(given.items(), ("inputs", "parameters"), PARAMETERS, within="parameters")
    document = dict(fields.known)
    image = document.get("inputs")
    if image is None or image == "":
        raise MissingImage("The member inputs is missing; send the image there as base64 or a URL.")
    options = _options(document.get("parameters"))
    return image_or_url(image, "inputs"), options.ignoring(*fields.ignored)


def _options(parameters: Any) -> CaptionOptions:
    outer = member_object(parameters, "parameters")
    levels: list[Mapping[str, Any]] = [{name: value for name, value in outer.items() if name not in NESTED}]
    levels += [member_object(outer.get(name), name) for name in NESTED]
    fields = sort_fields((pair for level in levels for pair in level.items()), PARAMETERS, PARAMETERS)
    given: dict[str, Any] = {}
    for name, value in fields.known:
        if given.setdefault(name, value) != value:
            raise InvalidOption(name, "be given once")
    options = _length(given.pop(MAX_LENGTH, None), CaptionOptions(clamp=True)).ignoring(*fields.ignored)
    sample = given.pop("do_sample", None)
    if sample is not None and not isinstance(sample, bool):
        raise InvalidOption("do_sample", "be true or false")
    # In transformers do_sample overrides the temperature, and sampling without a temperature uses 1.
    if sample is not None:
        given["temperature"] = given.get("temperature", 1) if sample else 0
    return options_from_json(given, options)


def _length(value: Any, options: CaptionOptions) -> CaptionOptions:
    """Returns the options with `max_length`, which counts the start token of a caption too. A later
    `max_new_tokens` overrides it, as in transformers."""
    try:
        checked = options_from_json({"max_new_tokens": value}, options)
    except InvalidOption as error:
        raise InvalidOption(MAX_LENGTH, error.must) from None
    length = checked.sampling.max_new_tokens or 0
    return options_from_json({"max_new_tokens": length - 1}, options) if length > 1 else checked
