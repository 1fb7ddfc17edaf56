"""Reads an image as Hugging Face's clients send it: the raw body, or base64 in JSON with parameters."""

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request

from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.api.bodies.json_body import image_from_base64, json_object, member_object
from snapcap.service.api.caption.request import read_image_or_json
from snapcap.service.captioning.options import NAMES, CaptionOptions, options_from_json
from snapcap.service.errors import InvalidOption, MissingImage, UnknownOption

# The names under which clients and older pipelines nest the parameters of generation.
NESTED = ("generation_parameters", "generate_kwargs")
PARAMETERS = (*NAMES, "do_sample")


async def read_huggingface(request: Request, limits: BodyLimits, pool: Executor) -> tuple[bytes, CaptionOptions]:
    """The image and the options. Raises the subclasses of BadRequest that say what is wrong."""
    found = await read_image_or_json(request, limits, pool, parse_inputs)
    return (found, CaptionOptions(clamp=True)) if isinstance(found, bytes) else found


def parse_inputs(body: bytes) -> tuple[bytes, CaptionOptions]:
    """`{"inputs": base64, "parameters": {…}}`. Raises the subclasses of BadRequest that say what is wrong."""
    document = json_object(body, '{"inputs": "…base64…"}')
    for name in document:
        if name not in ("inputs", "parameters"):
            raise UnknownOption(name, ("inputs", "parameters"))
    image = document.get("inputs")
    if image is None or image == "":
        raise MissingImage("The member inputs is missing; send the image there as base64.")
    return image_from_base64(image, "inputs"), _options(document.get("parameters"))


def _options(parameters: Any) -> CaptionOptions:
    outer = member_object(parameters, "parameters")
    levels: list[Mapping[str, Any]] = [{name: value for name, value in outer.items() if name not in NESTED}]
    levels += [member_object(outer.get(name), name) for name in NESTED]
    given: dict[str, Any] = {}
    for level in levels:
        for name, value in level.items():
            if name not in PARAMETERS:
                raise UnknownOption(name, PARAMETERS)
            if value is not None and given.setdefault(name, value) != value:
                raise InvalidOption(name, "be given once")
    sample = given.pop("do_sample", None)
    if sample is not None and not isinstance(sample, bool):
        raise InvalidOption("do_sample", "be true or false")
    # As transformers has it: do_sample decides, and its temperature is 1 unless another is given.
    if sample is not None:
        given["temperature"] = given.get("temperature", 1) if sample else 0
    return options_from_json(given, CaptionOptions(clamp=True))
