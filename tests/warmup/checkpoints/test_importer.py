"""`snapcap import` on folders as older transformers left them: slow tokenizers and pickled weights."""

import errno
import json
import os
import stat
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import write_chat_files
from support.checkpoints.florence2_files import write_florence2
from support.checkpoints.permissions import denied
from tokenizers import pre_tokenizers
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.weights.read import read_tensors
from snapcap.warmup.checkpoints.importer import import_checkpoint
from snapcap.warmup.checkpoints.local import CheckpointError
from snapcap.warmup.options import S3Options

END, SAFE = "<|endoftext|>", "model.safetensors"


def tiny_model(tied: bool = True) -> Any:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    encoder = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=16,
    )
    decoder = GPT2Config(
        vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True,
        tie_word_embeddings=tied, bos_token_id=258, eos_token_id=258,
    )  # fmt: skip
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.tie_word_embeddings = tied
    config.decoder_start_token_id = config.eos_token_id = config.pad_token_id = 258
    torch.manual_seed(0)
    model: Any = VisionEncoderDecoderModel(config)
    return model.eval()


def write_slow_gpt2(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "re", "red", END])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nr e\nre d\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    """vocab.json and merges.txt, pytorch_model.bin with the head tied to the embedding in memory."""
    folder = tmp_path / "old"
    folder.mkdir()
    model = tiny_model()
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    state = model.state_dict()
    assert "decoder.lm_head.weight" in state
    torch.save(state, folder / "pytorch_model.bin")
    write_slow_gpt2(folder)
    processor = {"feature_extractor_type": "ViTFeatureExtractor", "size": 32}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def saved(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_an_old_folder_becomes_one_the_server_reads(old_folder: Path, tmp_path: Path) -> None:
    destination = tmp_path / "new" / "captioner"
    written = import_checkpoint(str(old_folder), destination)
    assert [path.name for path in written] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(destination.iterdir()) == written

    assert ModelConfig.from_folder(destination) == ModelConfig.from_folder(old_folder)
    assert ImageTransform.from_folder(destination, (32, 32)).size == (32, 32)
    old, new = Tokenizer.from_folder(old_folder), Tokenizer.from_folder(destination)
    assert new.encode("a red café") == old.encode("a red café")
    assert new.decode([0, 257, 258]) == old.decode([0, 257, 258]) == "!red"

    before = torch.load(old_folder / "pytorch_model.bin", weights_only=True)
    after = saved(destination)
    assert set(before) - set(after) == {"decoder.lm_head.weight"}
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_transformers_opens_what_was_written(old_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, VisionEncoderDecoderModel

    import_checkpoint(str(old_folder), tmp_path / "new")
    model: Any = VisionEncoderDecoderModel.from_pretrained(tmp_path / "new")
    model.eval()
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[258, 3, 5]])
    with torch.no_grad():
        expected = tiny_model()(pixel_values=pixels, decoder_input_ids=tokens).logits
        assert torch.equal(model(pixel_values=pixels, decoder_input_ids=tokens).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "new").encode("red") == [257]


def test_an_untied_head_that_shares_memory_is_kept(old_folder: Path, tmp_path: Path) -> None:
    config = json.loads((old_folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["decoder"]["tie_word_embeddings"] = False
    (old_folder / "config.json").write_text(json.dumps(config))
    import_checkpoint(str(old_folder), tmp_path / "new")
    tensors = saved(tmp_path / "new")
    assert torch.equal(tensors["decoder.lm_head.weight"], tensors["decoder.transformer.wte.weight"])


def test_sharded_pickles_become_one_file(old_folder: Path, tmp_path: Path) -> None:
    state = torch.load(old_folder / "pytorch_model.bin", weights_only=True)
    (old_folder / "pytorch_model.bin").unlink()
    names = sorted(state)
    shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for file, part in shards.items():
        torch.save(OrderedDict((name, state[name].clone()) for name in part), old_folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (old_folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    import_checkpoint(str(old_folder), tmp_path / "new")
    tensors = saved(tmp_path / "new")
    assert set(tensors) == set(state)
    assert all(torch.equal(tensors[name], state[name]) for name in names)


def test_safetensors_and_a_fast_tokenizer_are_copied(old_folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    import_checkpoint(str(old_folder), first)
    import_checkpoint(str(first), second)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}


def test_sharded_safetensors_are_copied(old_folder: Path, tmp_path: Path) -> None:
    tiny_model().save_pretrained(old_folder, max_shard_size="20KB")
    shards = {p.name for p in old_folder.glob("model*")}
    assert len(shards) > 2
    written = import_checkpoint(str(old_folder), tmp_path / "new")
    assert shards <= {p.name for p in written}
    assert not (tmp_path / "new" / "pytorch_model.bin").exists()


def word_piece_folder(folder: Path) -> Path:
    """A tokenizer that only transformers can read: of a class that snapcap does not know."""
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    (folder / "vocab.txt").write_text(
        "\n".join(["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "red", "dog", "##s"])
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "FunnelTokenizer"}))
    return folder


def test_another_slow_tokenizer_is_converted_by_transformers(old_folder: Path, tmp_path: Path) -> None:
    import_checkpoint(str(word_piece_folder(old_folder)), tmp_path / "new")
    tokenizer = Tokenizer.from_folder(tmp_path / "new")
    assert tokenizer.encode("red dogs") == [5, 6, 7]
    assert tokenizer.decode([2, 5, 6, 7, 3]) == "red dogs"


def test_without_transformers_the_package_is_named(
    old_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'snapcap\[transformers\]'"):
        import_checkpoint(str(word_piece_folder(old_folder)), tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_gpt2_files_need_no_transformers(old_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tmp_path / "new" / "tokenizer.json" in import_checkpoint(str(old_folder), tmp_path / "new")


def test_a_pickled_blip_loses_what_is_tied_and_keeps_every_file_it_needs(tmp_path: Path) -> None:
    from support.checkpoints import random_captioners
    from support.checkpoints.word_pieces import word_piece_vocabulary

    source, destination = tmp_path / "old", tmp_path / "new"
    model = random_captioners.blip({"image_size": 32})
    model.save_pretrained(source)
    (source / "model.safetensors").unlink()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    (source / "vocab.txt").write_text(word_piece_vocabulary())
    image_processor = {"image_processor_type": "BlipImageProcessor", "size": {"height": 32, "width": 32}}
    (source / "processor_config.json").write_text(json.dumps({"image_processor": image_processor}))
    names = {path.name for path in import_checkpoint(str(source), destination)}
    assert names >= {"config.json", "model.safetensors", "processor_config.json", "tokenizer.json"}
    tensors = saved(destination)
    assert set(model.state_dict()) - set(tensors) == {
        "text_decoder.cls.predictions.decoder.weight",
        "text_decoder.cls.predictions.decoder.bias",
    }
    again = type(model).from_pretrained(destination)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert ImageTransform.from_folder(destination, (32, 32), family="blip").resample == 3
    assert Tokenizer.from_folder(destination).decode([6, 7, 8]) == "a photography"


@pytest.mark.parametrize("name", ["chat_template.json", "chat_template.jinja"])
def test_a_chat_template_comes_along(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "from"
    random_captioners.smolvlm({}, {}).save_pretrained(folder)
    write_chat_files(folder)
    written = folder / "chat_template.jinja"
    template = written.read_text()
    written.unlink()
    (folder / name).write_text(json.dumps({"chat_template": template}) if name.endswith("json") else template)
    import_checkpoint(str(folder), tmp_path / "to")
    assert ModelConfig.from_folder(tmp_path / "to").chat == ModelConfig.from_folder(folder).chat is not None


def test_an_import_from_s3(s3: Any, s3_server: str, old_folder: Path, tmp_path: Path) -> None:
    for file in old_folder.iterdir():
        s3.put_object(Bucket="bucket", Key=f"old/{file.name}", Body=file.read_bytes())
    import_checkpoint("s3://bucket/old", tmp_path / "remote", S3Options(endpoint_url=s3_server))
    import_checkpoint(str(old_folder), tmp_path / "local")
    remote, local = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("remote", "local"))
    assert remote == local


def test_a_folder_with_files_is_only_written_by_force(old_folder: Path, tmp_path: Path) -> None:
    destination = tmp_path / "new"
    destination.mkdir()
    (destination / "config.json").write_text("mine")
    (destination / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; give another folder, or --force"):
        import_checkpoint(str(old_folder), destination)
    assert (destination / "config.json").read_text() == "mine"
    import_checkpoint(str(old_folder), destination, force=True)
    assert (destination / "config.json").read_bytes() == (old_folder / "config.json").read_bytes()
    assert (destination / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="is the source itself"):
        import_checkpoint(str(destination), destination, force=True)


def damage(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("pytorch_model.bin", None, "no weights in"),
        ("pytorch_model.bin", b"not a pickle", r"pytorch_model\.bin"),
        ("config.json", b'{"model_type": "bert"}', "model_type = 'bert'"),
        ("preprocessor_config.json", b'{"size": 64}', "size = 64"),
        ("vocab.json", None, "transformers cannot read the tokenizer"),
    ],
)
def test_what_cannot_be_imported_is_one_line_and_writes_nothing(
    old_folder: Path, tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    damage(old_folder, name, content)
    with pytest.raises(CheckpointError, match=expected) as caught:
        import_checkpoint(str(old_folder), tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_pickle_that_runs_code_does_not(old_folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"weight": Trap()}, old_folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        import_checkpoint(str(old_folder), tmp_path / "new")
    assert not (tmp_path / "sprung").exists()


def without_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of the folder, which has no file of them any more."""
    state: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    del state["decoder.lm_head.weight"]
    return {name: tensor.clone().contiguous() for name, tensor in state.items()}


def write_shards(folder: Path, index: str, files: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, str]:
    places = {name: files[number % len(files)] for number, name in enumerate(sorted(tensors))}
    for file in files:
        shard = {name: tensors[name] for name, place in places.items() if place == file}
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(shard, folder / file) if file.endswith("safetensors") else torch.save(shard, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


@pytest.mark.parametrize(
    ("index", "files", "kept"),
    [
        (f"{SAFE}.index.json", ("left.safetensors", "deep/er/right.safetensors"), True),
        (f"{SAFE}.index.json", ("weights.safetensors",), True),
        ("pytorch_model.bin.index.json", ("consolidated.00.pth", "deep/consolidated.01.pth"), False),
        ("pytorch_model.bin.index.json", ("left.safetensors", "right.safetensors"), False),
    ],
)
def test_every_shard_that_the_index_names_is_imported(
    old_folder: Path, tmp_path: Path, index: str, files: tuple[str, ...], kept: bool
) -> None:
    tensors = without_weights(old_folder)
    write_shards(old_folder, index, files, tensors)
    (old_folder / "modeling_evil.py").write_text("raise SystemExit")
    destination = tmp_path / "new"
    written = {path.relative_to(destination).as_posix() for path in import_checkpoint(str(old_folder), destination)}
    weights = {index, *files} if kept else {SAFE}
    assert weights <= written
    found = {path.relative_to(destination).as_posix() for path in destination.rglob("*") if path.is_file()}
    assert found == written
    assert not {name for name in written if name.endswith((".py", ".pth", ".bin"))}
    imported = read_tensors(destination)
    assert imported.keys() == tensors.keys()
    assert all(torch.equal(imported[name], tensors[name]) for name in tensors)


def test_a_file_goes_before_an_index_as_in_transformers(old_folder: Path, tmp_path: Path) -> None:
    tensors = without_weights(old_folder)
    shifted = {name: tensor + 1 for name, tensor in tensors.items()}
    write_shards(old_folder, f"{SAFE}.index.json", ("left.safetensors",), shifted)
    save_file(tensors, old_folder / SAFE)
    import_checkpoint(str(old_folder), tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir() if "safetensors" in path.name) == [SAFE]
    assert all(torch.equal(saved(tmp_path / "new")[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "kind", ["a shard is not there", "a shard lacks it", "a file lacks it", "its shape", "int8"]
)
def test_an_import_that_would_lose_a_tensor_fails_and_writes_nothing(
    old_folder: Path, tmp_path: Path, kind: str
) -> None:
    tensors, lost = without_weights(old_folder), "decoder.transformer.h.0.ln_1.weight"
    if "shard" in kind:
        places = write_shards(old_folder, f"{SAFE}.index.json", ("left.safetensors", "right.safetensors"), tensors)
        shard = places[lost]
        if kind == "a shard is not there":
            (old_folder / shard).unlink()
        else:
            others = {name: tensors[name] for name, place in places.items() if place == shard and name != lost}
            save_file(others, old_folder / shard)
    else:
        changed = {"its shape": torch.zeros(3), "int8": tensors.pop(lost).to(torch.int8)}
        save_file({**tensors, **({lost: changed[kind]} if kind in changed else {})}, old_folder / SAFE)
    with pytest.raises(CheckpointError, match=r"safetensors|decoder\.transformer\.h\.0\.ln_1\.weight"):
        import_checkpoint(str(old_folder), tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_index_that_leads_elsewhere_is_refused(old_folder: Path, tmp_path: Path) -> None:
    tensors = without_weights(old_folder)
    save_file(tensors, tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "../outside.safetensors")}
    (old_folder / f"{SAFE}.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which is no name of a file in the checkpoint"):
        import_checkpoint(str(old_folder), tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_tied_tensors_of_a_pickle_are_stored_once_and_read(tmp_path: Path) -> None:
    """Florence-2's embedding has four names."""
    model, source = random_captioners.florence2(), tmp_path / "old"
    write_florence2(source, {"vocab_size": 340, "d_model": 40, "max_position_embeddings": 200}, 0)
    tensors = load_file(source / SAFE)
    (source / SAFE).unlink()
    shared = tensors["model.language_model.shared.weight"]
    copies = (
        *(f"model.language_model.{part}.embed_tokens.weight" for part in ("encoder", "decoder")),
        "lm_head.weight",
    )
    torch.save({**tensors, **dict.fromkeys(copies, shared)}, source / "pytorch_model.bin")
    import_checkpoint(str(source), tmp_path / "new")
    assert saved(tmp_path / "new").keys() == tensors.keys()
    again = type(model).from_pretrained(tmp_path / "new").state_dict()
    assert all(torch.equal(again[name], shared) for name in copies)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_mode_that_the_umask_gives(old_folder: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        written = import_checkpoint(str(old_folder), tmp_path / "new" / "er")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o666 & ~umask}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", tmp_path / "new/er")} == {
        0o777 & ~umask
    }


@pytest.mark.parametrize("name", ["config.json", "pytorch_model.bin", "vocab.json", "preprocessor_config.json"])
def test_a_file_that_may_not_be_read_is_named(old_folder: Path, tmp_path: Path, name: str) -> None:
    with denied(old_folder / name), pytest.raises(CheckpointError, match=rf"{name}.*Permission denied") as caught:
        import_checkpoint(str(old_folder), tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("name", [SAFE, "chat_template.jinja", "special_tokens_map.json", "adapter_config.json"])
def test_by_force_no_file_of_another_checkpoint_is_read_beside(old_folder: Path, tmp_path: Path, name: str) -> None:
    write_shards(old_folder, f"{SAFE}.index.json", ("left.safetensors",), without_weights(old_folder))
    destination = tmp_path / "new"
    destination.mkdir()
    (destination / name).write_text("of another")
    with pytest.raises(CheckpointError, match=f"holds {name}, which the source does not have .* remove it"):
        import_checkpoint(str(old_folder), destination, force=True)
    assert [path.name for path in destination.iterdir()] == [name]


def test_a_link_to_itself_is_no_obstacle(old_folder: Path, tmp_path: Path) -> None:
    (old_folder / "runs").symlink_to("runs")
    assert tmp_path / "new" / SAFE in import_checkpoint(str(old_folder), tmp_path / "new")


def test_a_machine_without_a_temporary_folder_is_told_in_one_line(
    old_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", nowhere)
    with pytest.raises(CheckpointError, match="No usable temporary directory"):
        import_checkpoint(str(old_folder), tmp_path / "new")
