"""The image transform against the image processors of other families than ViT, from each of their files."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.parity.pictures import encoded, normalised, scene

from snapcap.models.config import ConfigError
from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.transform import ImageTransform, Normalisation

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


def write(folder: Path, name: str = "preprocessor_config.json", **fields: Any) -> Path:
    (folder / name).write_text(json.dumps(fields))
    return folder


def reference(kind: str, folder: Path, data: bytes) -> NDArray[np.float32]:
    """pixel_values [3, H, W] of transformers on the same file."""
    from transformers.image_utils import load_image
    from transformers.models.beit.image_processing_pil_beit import BeitImageProcessorPil
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kinds = {
        "Beit": BeitImageProcessorPil,
        "Blip": BlipImageProcessorPil,
        "CLIP": CLIPImageProcessorPil,
        "DeiT": DeiTImageProcessorPil,
        "Idefics3": Idefics3ImageProcessorPil,
        "Llava": LlavaImageProcessorPil,
        "Siglip": SiglipImageProcessorPil,
        "SmolVLM": SmolVLMImageProcessorPil,
    }
    processor: Any = kinds[kind].from_pretrained(folder)
    one_tile = {"do_image_splitting": False} if kind in ("Idefics3", "SmolVLM") else {}
    values = processor(load_image(Image.open(io.BytesIO(data))), return_tensors="np", **one_tile)["pixel_values"]
    return np.asarray(values[0][0] if one_tile else values[0], np.float32)


def assert_equal_to_transformers(kind: str, folder: Path, size: tuple[int, int], data: bytes) -> ImageTransform:
    transform = ImageTransform.from_folder(
        folder, size, family={"CLIP": "git", "Siglip": "llava"}.get(kind, kind.lower())
    )
    ours = normalised(transform, transform.decode(data).pixels)
    theirs = reference(kind, folder, data)
    assert ours.shape == theirs.shape == (3, *size)
    assert np.abs(ours - theirs).max() <= 1 / 255 / min(transform.normalisation.std) + 1e-6
    assert np.abs(ours - theirs).mean() < 1e-4
    return transform


@pytest.mark.parametrize("picture", [(640, 480), (31, 517), (384, 384), (1, 1), (97, 96)])
def test_blip_is_equal_to_transformers(tmp_path: Path, picture: tuple[int, int]) -> None:
    """As on the hub: no resample, no rescale_factor."""
    size = {"height": 384, "width": 384}
    write(tmp_path, size=size, image_processor_type="BlipImageProcessor", image_mean=CLIP["mean"], do_resize=True)
    transform = assert_equal_to_transformers("Blip", tmp_path, (384, 384), encoded(scene(*picture)))
    assert (transform.resample, *transform.normalisation[1:]) == (3, CLIP["mean"], CLIP["std"])


@pytest.mark.parametrize(
    ("kind", "settings", "size"),
    [
        ("Blip", {"image_processor_type": "BlipImageProcessorFast", "size": 96}, (96, 96)),
        ("Blip", {"image_processor_type": "BlipImageProcessor"}, (384, 384)),
        ("Blip", {"size": {"height": 48, "width": 80}, "resample": 2, "image_mean": [0.5, 0.4, 0.3]}, (48, 80)),
        ("Blip", {"size": 96, "do_normalize": False}, (96, 96)),
        ("DeiT", {"image_processor_type": "DeiTImageProcessor"}, (224, 224)),
        ("DeiT", {"feature_extractor_type": "DeiTFeatureExtractor", "size": 438, "crop_size": 384}, (384, 384)),
        ("DeiT", {"size": 384, "do_center_crop": False}, (384, 384)),
        ("Beit", {"image_processor_type": "BeitImageProcessor"}, (224, 224)),
        ("CLIP", {"image_processor_type": "CLIPImageProcessor"}, (224, 224)),
        ("CLIP", {"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224}, (224, 224)),
        ("CLIP", {"size": {"shortest_edge": 96}, "crop_size": {"height": 96, "width": 96}}, (96, 96)),
        ("CLIP", {"size": {"height": 96, "width": 96}, "do_center_crop": False, "do_normalize": False}, (96, 96)),
        ("Llava", {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}, (336, 336)),
        ("Llava", {"image_processor_type": "LlavaImageProcessorFast"}, (224, 224)),
        ("Siglip", {"image_processor_type": "SiglipImageProcessor"}, (224, 224)),
        (
            "Siglip",
            {"image_processor_type": "SiglipImageProcessorFast", "size": [384, 384], "resample": 1},
            (384, 384),
        ),
        ("Beit", {"size": 256, "do_center_crop": True, "do_reduce_labels": False}, (224, 224)),
    ],
    ids=str,
)
def test_settings_are_equal_to_transformers(
    tmp_path: Path, kind: str, settings: dict[str, Any], size: tuple[int, int]
) -> None:
    write(tmp_path, **settings)
    for picture in ((300, 233), (133, 200)):
        assert_equal_to_transformers(kind, tmp_path, size, encoded(scene(*picture)))


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    """A processor of transformers 5 nests the image processor in its own file, which goes before the plain one."""
    from support.checkpoints.word_pieces import word_piece_vocabulary
    from transformers import BertTokenizer, BlipProcessor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    (tmp_path / "vocab.txt").write_text(word_piece_vocabulary())
    size = {"height": 96, "width": 96}
    processor = BlipProcessor(BlipImageProcessorPil(size=size), BertTokenizer.from_pretrained(tmp_path))
    processor.save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    write(tmp_path, size=32, image_processor_type="ViTImageProcessor")
    transform = ImageTransform.from_folder(tmp_path, (96, 96), family="blip")
    assert (transform.size, transform.resample, transform.normalisation.mean) == ((96, 96), 3, CLIP["mean"])
    assert_equal_to_transformers("Blip", tmp_path, (96, 96), encoded(scene(120, 90)))


def test_without_a_file_the_defaults_of_the_family_hold_at_the_encoders_size(tmp_path: Path) -> None:
    transform = ImageTransform.from_folder(tmp_path, (96, 96), family="blip")
    assert transform == ImageTransform((96, 96), 3, normalisation=Normalisation(1 / 255, CLIP["mean"], CLIP["std"]))


@pytest.mark.parametrize("picture", [(640, 480), (31, 517), (225, 224), (1, 1), (97, 96)])
def test_git_is_equal_to_transformers(tmp_path: Path, picture: tuple[int, int]) -> None:
    """As on the hub: the shorter edge, then the middle."""
    size = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
    write(tmp_path, image_processor_type="CLIPImageProcessor", resample=3, **size)
    transform = assert_equal_to_transformers("CLIP", tmp_path, (224, 224), encoded(scene(*picture)))
    assert (transform.resample, *transform.normalisation[1:]) == (3, CLIP["mean"], CLIP["std"])


@pytest.mark.parametrize("kind", ["Idefics3", "SmolVLM"])
@pytest.mark.parametrize("picture", [(640, 480), (31, 517), (512, 512), (1, 1), (333, 1000)])
def test_one_tile_is_equal_to_transformers_without_splitting(
    tmp_path: Path, kind: str, picture: tuple[int, int]
) -> None:
    """As on the hub: resized to a longest edge of 2048, and then to a square whatever the shape."""
    sizes = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    switches = {"do_image_splitting": True, "do_pad": True, "do_resize": True, "resample": 1}
    write(tmp_path, image_processor_type=f"{kind}ImageProcessor", **sizes, **switches)
    transform = assert_equal_to_transformers(kind, tmp_path, (512, 512), encoded(scene(*picture)))
    assert (transform.resample, transform.normalisation.mean, transform.longest_edge) == (1, (0.5, 0.5, 0.5), 2048)
    write(tmp_path, image_processor_type=f"{kind}ImageProcessor", do_resize=False, **sizes)
    assert_equal_to_transformers(kind, tmp_path, (512, 512), encoded(scene(*picture)))


def test_a_tile_must_be_what_the_encoder_takes(tmp_path: Path) -> None:
    write(tmp_path, max_image_size={"longest_edge": 384})
    with pytest.raises(ConfigError, match=r"max_image_size.*512×512"):
        ImageTransform.from_folder(tmp_path, (512, 512), family="smolvlm")
    write(tmp_path, max_image_size={"longest_edge": 512}, size={"longest_edge": 8192})
    with pytest.raises(ConfigError, match=r"size.*at most 4096"):
        ImageTransform.from_folder(tmp_path, (512, 512), family="smolvlm")


def test_without_a_file_git_cuts_the_middle_out(tmp_path: Path) -> None:
    write(tmp_path, size={"shortest_edge": 96}, crop_size=96)
    named = ImageTransform.from_folder(tmp_path, (96, 96), family="git")
    (tmp_path / "preprocessor_config.json").unlink()
    assert ImageTransform.from_folder(tmp_path, (96, 96), family="git") == named


def test_a_picture_that_would_grow_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """Its shorter edge is to be 224: 2 × 3000 pixels would become 224 × 336,000. With room given, that decides."""
    transform = ImageTransform.from_folder(tmp_path, (224, 224), family="git")
    thin = Image.new("RGB", (2, 3000))
    for read in (lambda: transform.decode(encoded(thin)), lambda: transform.convert(thin)):
        with pytest.raises(ImageError, match="would be resized to 224×336000") as refused:
            read()
        assert refused.value.reason == "too_large"


def test_a_processor_file_without_an_image_processor_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "processor_config.json", processor_class="BlipProcessor")
    write(tmp_path, size=64, resample=1)
    transform = ImageTransform.from_folder(tmp_path, (64, 64), family="blip")
    assert (transform.resample, transform.normalisation.mean) == (1, CLIP["mean"])
    write(tmp_path, "processor_config.json", image_processor="Blip")
    with pytest.raises(ConfigError, match=r"image_processor = 'Blip'.*processor_config\.json"):
        ImageTransform.from_folder(tmp_path, (64, 64), family="blip")


@pytest.mark.parametrize("picture", [(640, 480), (31, 517), (1, 1)])
def test_florence2_is_equal_to_transformers(tmp_path: Path, picture: tuple[int, int]) -> None:
    """As on the hub: the whole picture as a square, without a crop."""
    size = {"size": {"height": 768, "width": 768}, "crop_size": {"height": 768, "width": 768}}
    statistics = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    named = {"image_processor_type": "CLIPImageProcessor", "image_seq_length": 577, "resample": 3}
    write(tmp_path, do_center_crop=False, **named, **size, **statistics)
    transform = assert_equal_to_transformers("CLIP", tmp_path, (768, 768), encoded(scene(*picture)))
    (tmp_path / "preprocessor_config.json").unlink()
    assert ImageTransform.from_folder(tmp_path, (768, 768), family="florence2") == transform
