"""Files of prepared weights: whatever bytes they have, each tensor is within them and over no other, or refused."""

import io
import json

import torch
from hypothesis import given
from support.attacks.fuzzing import fuzzed
from support.attacks.mutations import mutated

from snapcap.models.regions.table import Weights
from snapcap.models.weights.load import lay_out
from snapcap.models.weights.prepared import ITEM_BYTES, Header, PreparedError, read_header, sealed

SHARED = torch.arange(8.0)
TURNED = torch.arange(6.0).reshape(2, 3).t()
HALF = torch.ones(5, 1, dtype=torch.bfloat16)
CONTENTS = lay_out(Weights({"first": ((SHARED, TURNED),), "second": ((HALF, SHARED), (TURNED, HALF))}), "key")
TENSORS = b"".join(CONTENTS.chunks())
HEADER = CONTENTS.header_bytes()[8:].rstrip()
MARKS = (
    b"null",
    b"[]",
    b"{}",
    b"-1",
    b"1.0",
    b"true",
    b"1e999",
    b"NaN",
    b"9" * 30,
    b"281474976710656",
    b"\\ud800",
    b"padding.",
    b'"U8"',
    b'"first.0.0"',
    b'\\"first.0.0\\"',
)


def check(data: bytes) -> bool:
    """Whether it is opened; then nothing in it leads out of the file."""
    try:
        header, begin = read_header(io.BytesIO(data), len(data))
    except PreparedError as error:
        sentence = str(error)
    else:
        _check_within(header, begin, len(data))
        return True
    assert len(sentence) < 300, "a line of the log that grows with the file"
    return False


def _check_within(header: Header, begin: int, size: int) -> None:
    assert begin + header.size == size
    end = 0
    for tensor in sorted(header.tensors.values(), key=lambda each: each.offset):
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
        assert (last + 1) * ITEM_BYTES[tensor.dtype] == tensor.nbytes, "each element once"
        assert tensor.offset >= end
        end = tensor.offset + tensor.nbytes
    assert end <= header.size
    used = {name for layers in header.regions.values() for layer in layers for name in layer}
    assert used == header.tensors.keys()


def wrapped(text: bytes) -> bytes:
    """A file with this header, and a length and a digest that fit it."""
    length = len(text) + -(8 + len(text)) % 4096
    return length.to_bytes(8, "little") + sealed(text.ljust(length)) + TENSORS


def test_the_seed_is_opened() -> None:
    assert check(wrapped(HEADER))
    assert set(json.loads(HEADER)) >= {"__metadata__", "first.0.0", "padding.1"}


@fuzzed(1_500)
@given(mutated([HEADER], MARKS))
def test_headers(text: bytes) -> None:
    check(wrapped(text))


@fuzzed(300)
@given(mutated([wrapped(HEADER)], MARKS))
def test_files(data: bytes) -> None:
    check(data)
