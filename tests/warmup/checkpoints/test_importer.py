"""`snapcap import` on folders as older transformers left them: slow tokenizers and pickled weights."""

import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import write_chat_files
from tokenizers import pre_tokenizers
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.processing.transform import ImageTransform
from snapcap.warmup.checkpoints.importer import import_checkpoint
from snapcap.warmup.checkpoints.patterns import CheckpointError
from snapcap.warmup.options import S3Options

END = "<|endoftext|>"


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
