"""The files of a checkpoint: damaged, truncated, dangerous or absent, each refused by name."""

import codecs
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.permissions import denied
from torch import Tensor

from snapcap.models.errors import UserError, WeightsError
from snapcap.models.weights.listing import MOST_FILES, MOST_INDEX_BYTES, weight_names
from snapcap.models.weights.read import read_tensors

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


UNSAFE = (
    *(
        "../model.safetensors",
        "/etc/passwd",
        "..",
        "",
        ".",
        "sub/../../model.safetensors",
        "sub//model.safetensors",
    ),
    *("./model.safetensors", ".hidden.safetensors", "sub/.git/model.safetensors", "sub\\model.safetensors"),
    *("model\n.safetensors", "model\0.safetensors", "model.py", "sub/", "x" * 300, "a/b/c/d/e.safetensors"),
)


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("kind", [SAFE, BIN])
def test_an_index_may_not_name_a_file_elsewhere(
    folder: Path, tensors: dict[str, Tensor], name: str, kind: str
) -> None:
    (folder / "sub").mkdir()
    for place in (folder.parent / SAFE, folder / "sub" / SAFE, folder / SAFE.replace("model", "another")):
        save_file(tensors, place)
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match=r"names .*, which is no name of a file in the checkpoint") as refusal:
        read_tensors(folder)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


# What shards are called where transformers did not write them: names, folders and formats.
SHARDS = {
    "other names": (SAFE, ("left.safetensors", "right.safetensors")),
    "no ending": (SAFE, ("weights.part1", "weights.part2")),
    "a folder": (SAFE, ("shards/0.safetensors", "shards/1.safetensors")),
    "one file": (SAFE, ("weights.safetensors", "weights.safetensors")),
    "pickles": (BIN, ("consolidated.00.pth", "deep/er/consolidated.01.pth")),
    "safetensors in an index of pickles": (BIN, ("left.safetensors", "right.safetensors")),
}


def write_shards(folder: Path, tensors: dict[str, Tensor], kind: str, files: tuple[str, ...]) -> None:
    places = {name: files[number % len(files)] for number, name in enumerate(tensors)}
    for file in set(files):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shard = {name: tensors[name] for name, place in places.items() if place == file}
        torch.save(shard, path) if path.suffix == ".pth" else save_file(shard, path)
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("name", SHARDS)
def test_shards_are_those_that_the_index_names(folder: Path, tensors: dict[str, Tensor], name: str) -> None:
    kind, files = SHARDS[name]
    write_shards(folder, tensors, kind, files)
    save_file({"a": torch.zeros(1)}, folder / "model-00001-of-00001.safetensors")  # which nobody names
    assert weight_names(folder) == [f"{kind}.index.json", *sorted(set(files))]
    found = read_tensors(folder)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[each], tensors[each]) for each in tensors)


def test_a_tensor_of_several_shards_is_that_of_the_one_which_the_index_names(
    folder: Path, tensors: dict[str, Tensor]
) -> None:
    """What a shard holds beside it, and no other, is read too, as by transformers."""
    write_shards(folder, tensors, SAFE, ("left.safetensors", "right.safetensors"))
    save_file({"a": tensors["a"], "b": torch.zeros(7), "c": torch.ones(3)}, folder / "left.safetensors")
    found = read_tensors(folder)
    assert torch.equal(found["b"], tensors["b"])
    assert found["c"].tolist() == [1, 1, 1]
    save_file({"b": tensors["b"], "c": torch.zeros(3)}, folder / "right.safetensors")
    with pytest.raises(WeightsError, match=r"left\.safetensors and right\.safetensors both hold 'c'"):
        read_tensors(folder)


def test_a_tensor_that_the_index_looks_for_in_the_wrong_shard_is_found(
    folder: Path, tensors: dict[str, Tensor]
) -> None:
    """transformers reads every tensor of the named shards too."""
    write_shards(folder, tensors, SAFE, ("left.safetensors", "right.safetensors"))
    index = folder / f"{SAFE}.index.json"
    places = json.loads(index.read_text())["weight_map"]
    turned = {"left.safetensors": "right.safetensors", "right.safetensors": "left.safetensors"}
    index.write_text(json.dumps({"weight_map": {name: turned[file] for name, file in places.items()}}))
    assert weight_names(folder) == [index.name, "left.safetensors", "right.safetensors"]
    found = read_tensors(folder)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[each], tensors[each]) for each in tensors)


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "{",
            "[]",
            "{}",
            "\xff",
            "[" * 100_000,
            '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
        ),
        *('{"weight_map": [1]}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}', '{"weight_map": null}'),
    ],
)
def test_an_index_that_is_none_is_refused(folder: Path, content: str) -> None:
    (folder / f"{SAFE}.index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(WeightsError, match="is not a weight index: it ") as refusal:
        read_tensors(folder)
    assert len(str(refusal.value)) < 200


def test_an_index_is_bounded(folder: Path) -> None:
    index = folder / f"{SAFE}.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(MOST_FILES + 1)}}))
    with pytest.raises(WeightsError, match=f"names {MOST_FILES + 1} files; at most {MOST_FILES} are read"):
        read_tensors(folder)
    with index.open("wb") as file:
        file.truncate(MOST_INDEX_BYTES + 1)
    with pytest.raises(WeightsError, match="has more than"):
        read_tensors(folder)


def test_a_folder_without_weights_says_what_is_expected(folder: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth"):
        (folder / name).touch()
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is expected; download or copy them again$"):
        read_tensors(folder)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model.fp16.safetensors", r"is not read; if it holds the whole model, rename it to model\.safetensors"),
        ("last.ckpt", r"is not read; if it holds the whole model, rename it to pytorch_model\.bin"),
        ("model-00002-of-00003.safetensors", r"is a part .* model\.safetensors\.index\.json is missing"),
        ("pytorch_model-00002-of-00003.bin", r"is a part .* pytorch_model\.bin\.index\.json is missing"),
        ("model-Q4_K_M.gguf", "is not read; give the model's PyTorch weights"),
        ("model.onnx", "is not read; give the model's PyTorch weights"),
        ("tf_model.h5", "is not read; give the model's PyTorch weights"),
    ],
)
def test_weights_of_another_name_or_program_are_named_with_what_to_do(folder: Path, name: str, advice: str) -> None:
    for each in (name, "training_args.bin"):
        (folder / each).touch()
    with pytest.raises(WeightsError, match=f"is expected; {re.escape(repr(name))},? .*{advice}"):
        read_tensors(folder)


def test_a_dictionary_without_tensors_by_name_is_refused(folder: Path, tensors: dict[str, Tensor]) -> None:
    """As Lightning and training loops save it, with the tensors in an object of their own."""
    torch.save({"state_dict": tensors, "epoch": 3}, folder / BIN)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin .*no tensors by name; save the model's state_dict"):
        read_tensors(folder)


@pytest.mark.parametrize("name", [SAFE, BIN, f"{SAFE}.index.json"])
def test_a_pointer_of_git_lfs_is_called_so(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    with pytest.raises(UserError, match=rf"{re.escape(name)} .*Git LFS pointer to the file; run git lfs pull"):
        read_tensors(folder)


@pytest.mark.parametrize("name", [SAFE, BIN, "left.safetensors"])
def test_a_link_to_nowhere_is_named_with_what_it_links_to(
    folder: Path, tensors: dict[str, Tensor], name: str
) -> None:
    """Folders of the hub's cache hold links, which a copy of one folder leaves behind."""
    if name == "left.safetensors":
        write_shards(folder, tensors, SAFE, (name, "right.safetensors"))
        (folder / name).unlink()
    (folder / name).symlink_to("../blobs/abc")
    with pytest.raises(UserError, match=rf"{re.escape(name)} cannot be read: it is a link to ../blobs/abc, which"):
        read_tensors(folder)


def test_a_byte_order_mark_before_an_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    write_shards(folder, tensors, SAFE, ("left.safetensors", "right.safetensors"))
    index = folder / f"{SAFE}.index.json"
    index.write_bytes(codecs.BOM_UTF8 + index.read_bytes())
    assert read_tensors(folder).keys() == tensors.keys()


@pytest.mark.parametrize("name", [SAFE, BIN, f"{SAFE}.index.json", "left.safetensors"])
def test_a_file_that_may_not_be_read_is_named(folder: Path, tensors: dict[str, Tensor], name: str) -> None:
    if name in (SAFE, BIN):
        save_file(tensors, folder / SAFE) if name == SAFE else torch.save(tensors, folder / BIN)
    else:
        write_shards(folder, tensors, SAFE, ("left.safetensors", "right.safetensors"))
    with denied(folder / name), pytest.raises(UserError, match=rf"{re.escape(name)}.*Permission denied") as refusal:
        read_tensors(folder)
    assert str(folder / name) in str(refusal.value)
    with denied(folder), pytest.raises(UserError, match="Permission denied"):
        read_tensors(folder)
