"""What is recorded of a chat template: found without the libraries of text, and never for another checkpoint."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.checkpoints.chat_files import PREFIX, TEMPLATE, write_chat_files
from support.servers.server_process import python

from snapcap.models.fields import FileError
from snapcap.models.processing import chat
from snapcap.warmup.plan import checkpoint
from snapcap.warmup.plan.checkpoint import read_config

CONFIG = {
    "model_type": "smolvlm",
    "text_config": {"hidden_size": 48, "num_attention_heads": 6, "vocab_size": 400},
    "vision_config": {"image_size": 96, "patch_size": 16, "hidden_size": 48, "num_attention_heads": 3},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_chat_files(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_second_start_imports_no_library_of_text(folder: Path, store: Path) -> None:
    wanted = read_config(folder, store)
    assert wanted.prefix == PREFIX
    code = (
        "import sys; from pathlib import Path; from snapcap.warmup.plan.checkpoint import read_config\n"
        "print(read_config(Path(sys.argv[1]), Path(sys.argv[2])))\n"
        "print({'tokenizers', 'jinja2', 'subprocess'} & set(sys.modules))"
    )
    config, imported = python("-c", code, str(folder), str(store)).stdout.splitlines()
    assert (config, imported) == (str(wanted), "set()")


def test_what_decides_it_makes_another_record(folder: Path, store: Path, tmp_path: Path) -> None:
    read_config(folder, store)
    write_chat_files(folder, TEMPLATE.replace("{{':'}}", "{{','}}"))
    changed = read_config(folder, store)
    assert changed.prefix != PREFIX
    assert len(list((store / "chats").iterdir())) == 1, "a new one takes the place of the old one"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[","], vocabulary["."] = vocabulary["."], vocabulary[","]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_config(folder, store).prefix != changed.prefix
    copy = shutil.copytree(folder, tmp_path / "other")
    assert read_config(copy, store) == read_config(folder, store)
    assert len(list((store / "chats").iterdir())) == 2


def test_what_is_no_file_is_not_read(folder: Path, store: Path) -> None:
    wanted = read_config(folder, store)
    (folder / "vocab.txt").mkdir()
    os.mkfifo(folder / "merges.txt")
    assert read_config(folder, store) == wanted


def test_a_link_that_leads_nowhere_is_named_where_the_tokens_are_recorded_too(folder: Path, store: Path) -> None:
    read_config(folder, store)
    (folder / "vocab.txt").symlink_to("gone")
    with pytest.raises(FileError, match=r"vocab\.txt cannot be read: it is a link to gone"):
        read_config(folder, store)


def test_another_version_of_a_library_makes_another_record(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_config(folder, store)
    (file,) = (store / "chats").iterdir()
    before = file.read_text()
    monkeypatch.setattr(checkpoint, "installed_version", lambda library: "0.0")
    read_config(folder, store)
    assert file.read_text() != before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: "{",
        lambda record: "[]",
        lambda record: json.dumps({**record, "digest": "0" * 64}),
        lambda record: json.dumps({**record, "chat": {**record["chat"], "start_id": "3"}}),
        lambda record: json.dumps({**record, "chat": {**record["chat"], "prefix": [True]}}),
        lambda record: json.dumps({**record, "chat": {**record["chat"], "prefix": [-1]}}),
        lambda record: json.dumps({**record, "chat": {**record["chat"], "lead": 1}}),
        lambda record: json.dumps({**record, "chat": {**record["chat"], "other": 1}}),
        lambda record: json.dumps({**record, "chat": None}),
    ],
)
def test_what_is_no_record_is_replaced(folder: Path, store: Path, spoil) -> None:
    wanted = read_config(folder, store)
    (file,) = (store / "chats").iterdir()
    good = file.read_text()
    file.write_text(spoil(json.loads(good)))
    assert read_config(folder, store) == wanted
    assert file.read_text() == good


def test_others_cannot_write_one(folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start goes on without, and so it does where nothing can be written."""
    wanted = read_config(folder, store)
    (file,) = (store / "chats").iterdir()
    lying = file.read_text().replace('"prefix": [1', '"prefix": [2')
    file.write_text(lying)
    assert read_config(folder, store).prefix[0] == 2, "whose owner we are is believed"
    file.chmod(0o666)
    assert read_config(folder, store) == wanted
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(30, "read-only")))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("Assistant", "Model"))
    assert read_config(folder, store).chat == chat.read_chat(folder, wanted.markup)
