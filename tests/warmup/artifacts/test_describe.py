"""What `snapcap explain` says a key is for."""

from pathlib import Path

from support.checkpoints import random_captioners

from snapcap.models.config import ModelConfig
from snapcap.warmup.artifacts.key import Factors, describe_model
from snapcap.warmup.plan.plan import Plan

PLAN = Plan(device="cpu", dtype="float32", buckets=(1, 4), cache_length=32, threads=1)


def factors(folder: Path) -> Factors:
    return PLAN.factors(ModelConfig.from_folder(folder), "aot")


def test_a_key_says_its_family_and_shapes(demo_folder: Path, tmp_path: Path) -> None:
    random_captioners.blip().save_pretrained(tmp_path)
    assert describe_model(factors(demo_folder)) == (
        "vision-encoder-decoder: vit 96×96, 4 layers of 192 → gpt2, 2 layers of 192, 393 tokens; float32"
    )
    assert describe_model(factors(tmp_path)) == (
        "blip: blip 96×96, 2 layers of 48 → blip, 2 layers of 48, 97 tokens; float32"
    )


def test_a_manifest_of_another_version_is_described_as_far_as_it_goes() -> None:
    known = {"model.vision.num_layers": 4, "model.vision.hidden_size": 192, "model.dtype": "bfloat16"}
    assert describe_model(known) == "?: ? ?, 4 layers of 192 → ?, ? layers of ?, ? tokens; bfloat16"
