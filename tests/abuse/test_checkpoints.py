"""A checkpoint whose files hold Python, and `snapcap import` of it with "y" on standard input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.checkpoints import random_captioners
from support.checkpoints.random_captioners import VISION

from snapcap.warmup.checkpoints.importer import import_checkpoint
from snapcap.warmup.checkpoints.local import CheckpointError

# It would run whichever module transformers were led to, when that is imported.
TRAP = """
import pathlib
pathlib.Path({sprung!r}).touch()
from transformers import BertConfig, BertTokenizer
class EvilConfig(BertConfig): model_type = "bert"
class EvilTokenizer(BertTokenizer): pass
"""
CONFIG_MAP = {"AutoConfig": "evil.EvilConfig", "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BLIP, with files of a tokenizer that only transformers can read."""
    folder = tmp_path_factory.mktemp("captioner")
    random_captioners.blip().save_pretrained(folder)
    (folder / "vocab.txt").write_text(
        "\n".join(["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "red", "dog", "##s"])
    )
    return folder


def armed(source: Path, folder: Path, sprung: Path, **files: dict[str, Any]) -> Path:
    """A copy with the trap, and with more fields in the files of these names."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, fields in files.items():
        path = folder / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | fields))
    for name in ("evil.py", "tokenization_evil.py", "configuration_evil.py"):
        (folder / name).write_text(TRAP.format(sprung=str(sprung)))
    return folder


def imported(folder: Path, destination: Path, home: Path) -> tuple[int, str]:
    """Exit status and output of an import to which somebody says yes, over a pipe that stays open."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "snapcap", "import", str(folder), str(destination)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("y\n" * 8)
        process.stdin.flush()
        output = process.stdout.read()
        return process.wait(), output


# transformers asks where it knows neither the type nor the class. Of BLIP snapcap reads no decoder's configuration.
FUNNEL = {"tokenizer_class": "FunnelTokenizer"}
ATTACKS: dict[str, dict[str, dict[str, Any]]] = {
    "a decoder of an unknown type": {
        "config": {"decoder": {"model_type": "evil", "auto_map": CONFIG_MAP}, "auto_map": CONFIG_MAP},
        "tokenizer_config": FUNNEL,
    },
    "the tokenizer": {"tokenizer_config": {"tokenizer_class": "EvilTokenizer", "auto_map": CONFIG_MAP}},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_import_runs_and_copies_no_code_and_asks_nothing(attack: str, captioner: Path, tmp_path: Path) -> None:
    sprung, destination = tmp_path / "sprung", tmp_path / "new"
    folder = armed(captioner, tmp_path / "evil", sprung, **ATTACKS[attack])
    status, output = imported(folder, destination, tmp_path / "home")
    assert not sprung.exists()
    assert not list(destination.rglob("*.py"))
    assert not [path for path in (tmp_path / "home").rglob("*.py") if "evil" in path.name]
    assert "[y/N]" not in output
    assert "trust_remote_code" not in output
    assert "the home folder is not available" not in output, "its cache is meant to be gone afterwards"
    if attack == "the tokenizer":
        assert status == 3, output
        assert "is Python code of the checkpoint, which is never run" in output
    else:
        assert status == 0, output
        assert (destination / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", ["evil", "custom_codegen", "../evil", ["bert"], None])
def test_a_decoder_of_a_type_that_is_not_supported_is_refused_before_transformers_sees_it(
    kind: object, captioner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    parts = {"encoder": {"model_type": "vit", **VISION}, "decoder": {"model_type": kind}}
    config = {"model_type": "vision-encoder-decoder", **parts}
    folder = armed(captioner, tmp_path / "evil", tmp_path / "sprung", config=config)
    with pytest.raises(CheckpointError, match=r"unsupported decoder\.model_type"):
        import_checkpoint(str(folder), tmp_path / "new")


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.txt", "model.safetensors"])
def test_a_link_out_of_a_checkpoint_is_refused_and_its_file_is_not_copied(
    name: str, captioner: Path, tmp_path: Path
) -> None:
    """An archive from a stranger may have links to files of whoever imports it."""
    folder = armed(captioner, tmp_path / "evil", tmp_path / "sprung")
    secret = tmp_path / "secret"
    secret.write_text("a-secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"{name} is a link out of the checkpoint"):
        import_checkpoint(str(folder), tmp_path / "new")
    assert not any(path.is_file() for path in (tmp_path / "new").rglob("*"))


def test_links_of_the_hubs_cache_are_followed(captioner: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in captioner.iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert tmp_path / "new" / "model.safetensors" in import_checkpoint(str(snapshot), tmp_path / "new")
