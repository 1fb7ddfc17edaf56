"""Prepared weights: those of `load_weights` bit for bit, in a file that is mapped and read without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.checkpoints.chat_files import LLAVA_TEMPLATE, TEMPLATE, write_chat_files
from support.checkpoints.prepared import write_prepared
from support.checkpoints.random_pairs import CAPTIONERS
from support.parity.parity import NORMALISATION, weight_bytes

from snapcap.models.config import ModelConfig
from snapcap.models.regions.table import Weights
from snapcap.models.weights.load import load_weights, prepared_weights
from snapcap.models.weights.prepared import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MappedWeights,
    PreparedError,
    map_weights,
    sealed,
)

KEY = "made-of-this"
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, layout: str = "cpu") -> Weights:
    return load_weights(folder, ModelConfig.from_folder(folder), NORMALISATION, CPU, dtype, layout)


def opened(path: Path, key: str = KEY) -> MappedWeights:
    with path.open("rb") as file:
        return map_weights(file, key)


def written(weights: Weights, folder: Path) -> Path:
    path = folder / "prepared.safetensors"
    write_prepared(path, weights, KEY)
    return path


def pointers(weights: Weights) -> list[int]:
    """The place of each tensor's first appearance: equal for two that are one."""
    flat = [tensor.data_ptr() for layers in weights.sets.values() for layer in layers for tensor in layer]
    return [flat.index(each) for each in flat]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_captioner: Callable[..., Any]) -> Path:
    """A ViT and GPT-2 whose embeddings are larger than a chunk."""
    folder = tmp_path_factory.mktemp("saved")
    make_captioner({"hidden_size": 72}, {"vocab_size": 24001}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(load(folder), tmp_path_factory.mktemp("prepared"))


@pytest.mark.parametrize("layout", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", CAPTIONERS)
def test_prepared_weights_are_those_that_were_loaded(
    family: str, dtype: torch.dtype, layout: str, tmp_path: Path
) -> None:
    CAPTIONERS[family]().save_pretrained(tmp_path)
    write_chat_files(tmp_path, LLAVA_TEMPLATE if family == "llava" else TEMPLATE)  # which others do not read
    loaded = load(tmp_path, dtype, layout)
    found = prepared_weights(opened(written(loaded, tmp_path)), CPU)
    assert list(found.sets) == list(loaded.sets)
    for region, layers in loaded.sets.items():
        for ours, theirs in zip(found.sets[region], layers, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), region
                assert torch.equal(one, other), region
                assert one.data_ptr() % 256 == 0
    assert pointers(found) == pointers(loaded), "what is tied stays one tensor"
    assert weight_bytes(found) == weight_bytes(loaded)


def test_gpt2_and_vit_with_tied_and_own_head(make_captioner: Callable[..., Any], tmp_path: Path) -> None:
    for tied in (True, False):
        make_captioner({}, {"tie_word_embeddings": tied}).save_pretrained(tmp_path / str(tied))
        loaded = load(tmp_path / str(tied), layout="cuda")
        found = prepared_weights(opened(written(loaded, tmp_path)), CPU)
        head, token = found.sets["decoder_after"][0][2], found.sets["decoder_before"][0][0]
        assert (head is token) is (loaded.sets["decoder_after"][0][2] is loaded.sets["decoder_before"][0][0])
        turned = found.sets["decoder_block"][1][2]
        assert turned.stride() == (1, turned.shape[0])


def test_weights_are_the_files_pages_and_writing_to_them_does_not_reach_it(prepared: Path) -> None:
    before = prepared.read_bytes()
    mapped = opened(prepared)
    weights = prepared_weights(mapped, CPU)
    beginning = torch.frombuffer(mapped.memory, dtype=torch.uint8).data_ptr()
    tensors = [tensor for layers in weights.sets.values() for layer in layers for tensor in layer]
    assert all(0 < tensor.data_ptr() - beginning < len(before) for tensor in tensors)
    tensors[0].add_(1)
    assert prepared.read_bytes() == before


def test_a_file_that_is_replaced_or_removed_stays_what_it_was_for_who_has_it(folder: Path, tmp_path: Path) -> None:
    path = written(load(folder), tmp_path)
    weights = prepared_weights(opened(path), CPU)
    other = tmp_path / "other"
    other.write_bytes(b"x" * path.stat().st_size)
    other.replace(path)
    for ours, theirs in zip(weights.sets["encoder_block"][0], load(folder).sets["encoder_block"][0], strict=True):
        assert torch.equal(ours, theirs)


def test_it_is_a_safetensors_file(folder: Path, prepared: Path) -> None:
    loaded = load(folder)
    with safe_open(prepared, framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith("padding.")]  # noqa: SIM118
        assert len(names) == len(opened(prepared).header.tensors)
        # As it lies, which for a CPU in fp32 is [in, out].
        assert torch.equal(file.get_tensor("encoder_block.1.2").t(), loaded.sets["encoder_block"][1][2])


def test_it_is_read_without_torch(folder: Path, prepared: Path) -> None:
    program = """
import json, struct, sys
from snapcap.models.weights.prepared import map_weights
with open(sys.argv[1], "rb") as file:
    mapped = map_weights(file, sys.argv[2])
name = mapped.header.regions["decoder_block"][1][2]
tensor = mapped.header.tensors[name]
begin = mapped.begin + tensor.offset
values = struct.unpack_from("<3f", mapped.memory, begin)
print(json.dumps([tensor.shape, tensor.strides, values, mapped.damaged_chunks(), sorted(sys.modules)]))
"""
    command = [sys.executable, "-c", program, str(prepared), KEY]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    shape, strides, values, damaged, modules = json.loads(run.stdout)
    expected = load(folder).sets["decoder_block"][1][2]
    assert (shape, strides) == (list(expected.shape), list(expected.stride()))
    assert values == expected.flatten()[:3].tolist()
    assert damaged == []
    assert {"torch", "numpy", "safetensors"}.isdisjoint(modules)


def test_each_chunk_has_its_digest(prepared: Path, tmp_path: Path) -> None:
    data = bytearray(prepared.read_bytes())
    mapped = opened(prepared)
    assert len(mapped.header.chunks) > 1
    data[mapped.begin + CHUNK_BYTES + 5] ^= 1
    copy = tmp_path / "copy"
    copy.write_bytes(data)
    assert opened(copy).damaged_chunks() == [1]


# --- what is not believed ---


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewritten(path: Path, header: dict[str, Any] | bytes, tensors: bytes) -> Path:
    """A file with this header, whose digest is right."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    if b'"digest":"' not in text:
        text += b' "digest":"' + b"0" * 64
    length = len(text) + -(8 + len(text)) % 4096
    path.write_bytes(length.to_bytes(8, "little") + sealed(text.ljust(length)) + tensors)
    return path


def refused(path: Path, says: str) -> None:
    with pytest.raises(PreparedError, match=says):
        opened(path)


NAME = "encoder_block.0.0"
Change = Callable[[dict[str, Any]], object]


def entry(**members: Any) -> Change:
    return lambda header: header[NAME].update(members)


def metadata(**members: Any) -> Change:
    return lambda header: header["__metadata__"].update(members)


CHANGES: dict[str, tuple[Change, str]] = {
    "another dtype": (entry(dtype="F16"), "not described"),
    "no such dtype": (entry(dtype="C64"), "not described"),
    "a dtype that is none": (entry(dtype=["F32"]), "not described"),
    "a larger shape": (entry(shape=[1 << 40]), "not described"),
    "a huge shape": (entry(shape=[1 << 200]), "not described"),
    "a shape of nothing": (entry(shape=[0, 72]), "not described"),
    "a negative shape": (entry(shape=[-72]), "not described"),
    "a shape that wraps around": (entry(shape=[1 << 32, 1 << 32]), "not described"),
    "too many dimensions": (entry(shape=[72, *[1] * 8]), "not described"),
    "a shape of truth": (entry(shape=[True, 72]), "not described"),
    "a shape of fractions": (entry(shape=[72.0]), "not described"),
    "another offset": (lambda h: h[NAME].update(data_offsets=[0, 288]), "overlap"),
    "an offset that is not aligned": (lambda h: _shift(h, 4), "not described"),
    "beyond the end": (lambda h: _shift(h, 1 << 40), "overlap"),
    "more members": (entry(more=1), "not described"),
    "no entry": (lambda h: h.update({NAME: None}), "not described"),
    "one tensor less": (lambda h: h.pop(NAME), "overlap"),
    "no metadata": (lambda h: h.pop("__metadata__"), "not JSON"),
    "no object of metadata": (lambda h: h.update(__metadata__=[h["__metadata__"]]), "other fields"),
    "more metadata": (metadata(more=""), "other fields"),
    "another format": (metadata(format="snapcap prepared weights 0"), "another format"),
    "metadata that is no text": (metadata(chunks=[]), "another format"),
    "another key": (metadata(key="made-of-that"), "something else"),
    "regions that are none": (metadata(regions="[]"), "not a JSON object"),
    "layers that are none": (metadata(regions='{"encoder_block": {}}'), "not lists of layers"),
    "no regions": (metadata(regions="{}"), "name other tensors"),
    "regions of numbers": (metadata(regions='{"encoder_block": [[1]]}'), "not lists of names"),
    "a layer with nothing": (metadata(regions='{"encoder_block": [[null]]}'), "not lists of names"),
    "regions twice": (metadata(regions='{"a": [], "a": []}'), "not JSON"),
    "a view of nothing": (metadata(views='{"nothing": [[1], [1]]}'), "view of no tensor"),
    "a view beyond the end": (metadata(views=f'{{"{NAME}": [[72], [2]]}}'), "not viewed"),
    "a view of one element": (metadata(views=f'{{"{NAME}": [[72], [0]]}}'), "not viewed"),
    "a view of more": (metadata(views=f'{{"{NAME}": [[72, 2], [1, 0]]}}'), "not viewed"),
    "a view of other dimensions": (metadata(views=f'{{"{NAME}": [[72], [1, 1]]}}'), "not viewed"),
    "a view of text": (metadata(views=f'{{"{NAME}": [["72"], [1]]}}'), "not viewed"),
    "chunks of text": (metadata(chunks="no digest"), "digests"),
}


def _shift(header: dict[str, Any], offset: int) -> None:
    header[NAME]["data_offsets"] = [each + offset for each in header[NAME]["data_offsets"]]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_in_a_header_is_believed(change: str, prepared: Path, tmp_path: Path) -> None:
    header, tensors = header_of(prepared)
    make, says = CHANGES[change]
    make(header)
    refused(rewritten(tmp_path / "changed", header, tensors), says)


def test_bytes_that_are_no_header_are_refused(prepared: Path, tmp_path: Path) -> None:
    data, path = prepared.read_bytes(), tmp_path / "changed"
    header, tensors = header_of(prepared)
    for short in (b"", data[:5], data[:4096]):
        path.write_bytes(short)
        refused(path, "length of a header")
    path.write_bytes((1 << 63).to_bytes(8, "little") + data[8:])
    refused(path, "length of a header")
    for text in (b"{", b"[]", b"\xff", b"[" * 4000, b'{"a": 1, "a": 2}', b'{"a": ' + b"9" * 5000 + b"}"):
        refused(rewritten(path, text, tensors), "not (a )?JSON")
    for cut in (tensors[:-1], tensors[:-4096], tensors + b"\0"):
        refused(rewritten(path, header, cut), "bytes of tensors|digests")


def test_a_file_without_tensors_is_refused(prepared: Path, tmp_path: Path) -> None:
    header, _ = header_of(prepared)
    nothing = {**header["__metadata__"], "regions": '{"encoder_block": []}', "views": "{}", "chunks": ""}
    refused(rewritten(tmp_path / "empty", {"__metadata__": nothing}, b""), "name other tensors")


def test_any_damage_of_a_header_is_found(prepared: Path, tmp_path: Path) -> None:
    data, path = prepared.read_bytes(), tmp_path / "changed"
    begin = opened(prepared).begin
    for place in (8, begin // 2, begin - 1, data.index(b'"digest":"') + 20):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        refused(path, "header is damaged")


def test_a_header_is_bounded(prepared: Path, tmp_path: Path) -> None:
    _, tensors = header_of(prepared)
    refused(rewritten(tmp_path / "large", b"{}" + b" " * MAX_HEADER_BYTES, tensors), "length of a header")
