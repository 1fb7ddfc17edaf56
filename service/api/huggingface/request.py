"""Reads the requests of Hugging Face clients: the image is the raw body, or base64 in JSON with parameters."""

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request

from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.api.bodies.json_body import image_from_base64, json_object, member_object
from snapcap.service.api.caption.request import read_image_or_json
from snapcap.service.captioning.options import NAMES, CaptionOptions, options_from_json, sort_fields
from snapcap.service.errors import InvalidOption, MissingImage

MAX_LENGTH = "max_length"
# Members in which clients and older pipelines nest the parameters of generation.
NESTED = ("generation_parameters", "generate_kwargs")
PARAMETERS = (*NAMES, "do_sample", MAX_LENGTH)


async def read_huggingface(request: Request, limits: BodyLimits, pool: Executor) -> tuple[bytes, CaptionOptions]:
    """Returns the image and the options of a request. Raises the subclasses of BadRequest that say what is
    wrong."""
    found = await read_image_or_json(request, limits, pool, parse_inputs)
    return (found, CaptionOptions(clamp=True)) if isinstance(found, bytes) else found


def parse_inputs(body: bytes) -> tuple[bytes, CaptionOptions]:
    """Parses `{"inputs": base64, "parameters": {…}}`. Raises the subclasses of BadRequest that say what is
    wrong."""
    given = json_object(body, '{"inputs": "…base64…"}')
    fields = sort_fields(given.items(), ("inputs", "parameters"), PARAMETERS, within="parameters")
    document = dict(fields.known)
    image = document.get("inputs")
    if image is None or image == "":
        raise MissingImage("The member inputs is missing; send the image there as base64.")
    options = _options(document.get("parameters"))
    return image_from_base64(image, "inputs"), options.ignoring(*fields.ignored)


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
