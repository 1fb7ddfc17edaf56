"""The files of a checkpoint: damaged, truncated, dangerous or absent, each refused by name."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from snapcap.models.weights.files import read_tensors
from snapcap.models.weights.listing import WeightsError

SAFE, BIN = "model.safetensors", "pytorch_model.bin"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {"a": torch.arange(600.0).view(20, 30), "b": torch.ones(5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty, in a folder of its own."""
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint"


class Exploit:
    """A pickle that runs a command when it is read as pickles are."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(folder: Path, zipped: bool) -> None:
    ran = folder / "ran"
    torch.save({"a": Exploit(f"touch {ran}")}, folder / BIN, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        WeightsError, match=r"pytorch_model\.bin is refused: .* save the model as safetensors"
    ) as refusal:
        read_tensors(folder)
    assert not ran.exists()
    assert "weights_only" not in str(refusal.value)
    torch.load(folder / BIN, weights_only=False)  # the exploit works where it is let
    assert ran.exists()


def test_a_bin_file_that_is_no_dictionary_is_refused(folder: Path) -> None:
    torch.save(torch.ones(2), folder / BIN)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin .* holds a Tensor, a dictionary of tensors"):
        read_tensors(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, tensors: dict[str, Tensor], kept: int) -> None:
    save_file(tensors, folder / SAFE)
    assert read_tensors(folder).keys() == tensors.keys()
    (folder / SAFE).write_bytes((folder / SAFE).read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors (is damaged|cannot be read): "):
        read_tensors(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_bin_file_is_named(folder: Path, tensors: dict[str, Tensor], zipped: bool) -> None:
    torch.save(tensors, folder / BIN, _use_new_zipfile_serialization=zipped)
    whole = (folder / BIN).read_bytes()
    for kept in (0, 10, len(whole) // 2):
        (folder / BIN).write_bytes(whole[:kept])
        with pytest.raises(WeightsError, match=r"^pytorch_model\.bin "):
            read_tensors(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_may_not_name_a_file_elsewhere(folder: Path, tensors: dict[str, Tensor], name: str) -> None:
    save_file(tensors, folder.parent / SAFE)
    (folder / "sub").mkdir()
    save_file(tensors, folder / "sub" / SAFE)
    (folder / f"{SAFE}.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match=rf"names '{re.escape(name)}', which is not in"):
        read_tensors(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(folder: Path, content: str) -> None:
    (folder / f"{SAFE}.index.json").write_text(content)
    with pytest.raises(WeightsError, match="is not a weight index"):
        read_tensors(folder)


def test_a_folder_without_weights_says_what_is_expected(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.safetensors or pytorch_model\.bin is expected"):
        read_tensors(folder)
