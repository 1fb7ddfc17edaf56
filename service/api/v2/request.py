"""Parses an inference request of the Open Inference Protocol v2: a batch of images in one tensor of BYTES.

In JSON an element is base64 text. With the binary tensor data extension the raw elements follow the JSON in the
body, each after its length. tritonclient uses the extension by default.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.service.api.bodies.json_body import image_from_base64, json_object, member_object
from snapcap.service.captioning.options import NAMES, CaptionOptions, integer, options_from_json, sort_fields
from snapcap.service.errors import (
    BadRequest,
    InvalidJson,
    InvalidOption,
    MissingImage,
    PayloadTooLarge,
    TooManyImages,
    UnsupportedOption,
)
from snapcap.service.limits import BINARY_HEADER_BYTES

INPUT = "image"
OUTPUT = "caption"
MAX_IMAGES = 16
BINARY_OUTPUT = "binary_data_output"
# In this API `timeout` is in microseconds, as in Triton.
MAX_TIMEOUT = 3_600_000_000
PARAMETERS = (*NAMES, BINARY_OUTPUT)
_MEMBERS = ("id", "parameters", "inputs", "outputs")
# Triton's tensor parameters that move the data elsewhere or return other data, each with the values without effect.
_TENSOR_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"shared_memory_region": (), "classification": (0,)}
_EXAMPLE = '{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["…base64…"]}]}'
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class InferRequest:
    """Holds a parsed request. `shape`: shape of the input and of the output. `binary`: the output follows the JSON
    as binary tensor data."""

    id: str | None
    images: tuple[bytes, ...]
    shape: tuple[int, ...]
    options: CaptionOptions
    binary: bool


def parse_infer(body: bytes, header_length: str | None) -> InferRequest:
    """Returns the parsed request. `header_length`: the value of Inference-Header-Content-Length, the length of the
    JSON before binary data; None: without the header, the whole body is JSON.

    Raises the subclasses of BadRequest that say what is wrong."""
    size = len(body) if header_length is None else _header_length(header_length, len(body))
    if size < len(body) and size > BINARY_HEADER_BYTES:
        raise PayloadTooLarge(f"The JSON before binary tensor data may have at most {BINARY_HEADER_BYTES} bytes.")
    fields = sort_fields(json_object(body[:size], _EXAMPLE).items(), _MEMBERS, within="parameters")
    document = dict(fields.known)
    within = sort_fields(member_object(document.get("parameters"), "parameters").items(), PARAMETERS, PARAMETERS)
    parameters = dict(within.known)
    tensor = _single(document.get("inputs"), "inputs", INPUT)
    if tensor.get("datatype") != "BYTES":
        raise UnsupportedOption("inputs[0].datatype", "an image is an element of BYTES")
    shape = _shape(tensor.get("shape"))
    return InferRequest(
        id=_identity(document.get("id")),
        images=_images(tensor, shape, memoryview(body)[size:]),
        shape=shape,
        options=_options(parameters).ignoring(*fields.ignored, *within.ignored),
        binary=_binary_output(document.get("outputs"), parameters),
    )


def bytes_elements(elements: Iterable[bytes]) -> bytes:
    """Returns BYTES elements as binary tensor data: each after its length in 4 bytes, little-endian."""
    return b"".join(len(each).to_bytes(_LENGTH_BYTES, "little") + each for each in elements)


def _header_length(text: str, body: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= body):
        raise BadRequest("Inference-Header-Content-Length must be the number of bytes of the JSON in the body.")
    return int(text)


def _shape(value: Any) -> tuple[int, ...]:
    shape = [integer(each) for each in value] if isinstance(value, list) else []
    # Clients send [n], or [n, 1] for a batch of n rows with one element each.
    if not shape or shape[0] is None or shape[0] < 1 or shape[1:] not in ([], [1]):
        raise InvalidOption("inputs[0].shape", "be [n] or [n, 1], for n images")
    if shape[0] > MAX_IMAGES:
        raise TooManyImages(f"There are {shape[0]} images; send at most {MAX_IMAGES} in one request.")
    return (shape[0], *(1 for _ in shape[1:]))


def _images(tensor: Mapping[str, Any], shape: tuple[int, ...], binary: memoryview) -> tuple[bytes, ...]:
    parameters = _tensor_parameters(tensor, "inputs", "binary_data_size")
    size = parameters.get("binary_data_size")
    if size is None:
        if binary:
            raise InvalidOption("inputs[0].parameters.binary_data_size", "say how many bytes follow the JSON")
        texts = _flat(tensor.get("data"))
        _check_count(len(texts), shape)
        images = [image_from_base64(each, f"inputs[0].data[{index}]") for index, each in enumerate(texts)]
    else:
        if tensor.get("data") is not None or integer(size) != len(binary):
            raise InvalidOption("inputs[0].parameters.binary_data_size", f"be {len(binary)}, what follows the JSON")
        images = _elements(binary, prod(shape))
        _check_count(len(images), shape)
    return tuple(images)


def _check_count(count: int, shape: tuple[int, ...]) -> None:
    if count != prod(shape):
        raise InvalidOption("inputs[0].shape", "have as many elements as there are images")


def _flat(data: Any) -> list[Any]:
    """Returns the elements of a JSON tensor. The data may be a flat list, or nested lists in the tensor's shape."""
    if not isinstance(data, list) or not data:
        raise MissingImage("The member inputs[0].data must be a list of images in base64.")
    return [each for row in data for each in (row if isinstance(row, list) else [row])]


def _elements(binary: memoryview, wanted: int) -> list[bytes]:
    """Splits binary tensor data into elements, at most one more than wanted."""
    images: list[bytes] = []
    at = 0
    while at < len(binary) and len(images) <= wanted:
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(binary[at:start], "little")
        images.append(bytes(binary[start:at]))
    if at > len(binary):
        raise InvalidJson("The binary tensor data ends within an element: send each behind its length in 4 bytes.")
    return images


def _options(parameters: Mapping[str, Any]) -> CaptionOptions:
    values = {name: value for name, value in parameters.items() if name in NAMES}
    if "timeout" in values:
        timeout = integer(values["timeout"])
        if timeout is None or not 0 < timeout <= MAX_TIMEOUT:
            raise InvalidOption("timeout", f"be a whole number of microseconds from 1 to {MAX_TIMEOUT}")
        values["timeout"] = timeout / 1e6
    return options_from_json(values, CaptionOptions())


def _binary_output(outputs: Any, parameters: Mapping[str, Any]) -> bool:
    everywhere = _switch(parameters, BINARY_OUTPUT, False)
    if outputs in (None, []):
        return everywhere
    output = _single(outputs, "outputs", OUTPUT)
    return _switch(_tensor_parameters(output, "outputs", "binary_data"), "binary_data", everywhere)


def _tensor_parameters(tensor: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    """Returns the parameter `name` of a tensor, in a dict that is empty without it. Refuses or ignores the
    others."""
    given = member_object(tensor.get("parameters"), f"{where}[0].parameters")
    return dict(sort_fields(given.items(), (name,), (name,), neutral=_TENSOR_NEUTRAL).known)


def _single(value: Any, where: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        raise InvalidOption(where, f"be a list of one tensor, named {name!r}")
    if value[0].get("name") != name:
        raise InvalidOption(f"{where}[0].name", f"be {name!r}")
    return value[0]


def _switch(values: Mapping[str, Any], name: str, default: bool) -> bool:
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise InvalidOption(name, "be true or false")
    return value


def _identity(value: Any) -> str | None:
    if value is None:
        return None
    # The reply repeats the id, and UTF-8 cannot encode half of a surrogate pair, which is not printable.
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise InvalidOption("id", "be at most 1000 printable characters")
    return value
