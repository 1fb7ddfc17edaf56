"""Pictures of any shape: transformers' sizes and patches to within 1/255, grids that are never too large."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.checkpoints.qwen3_vl_files import PROCESSOR
from support.parity.pictures import encoded, normalised, scene

from snapcap.models.fields import ConfigError
from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.packed import examples, fitting_size, grid_of, most_tokens, pack, write_grid
from snapcap.models.processing.processor_config import processed_size
from snapcap.models.processing.resample import Pixels
from snapcap.models.processing.transform import ImageTransform

SHAPES = [
    (1, 1),
    (31, 33),
    (640, 480),
    (480, 640),
    (500, 375),
    (512, 512),
    (513, 511),
    (200, 1),
    (1, 200),
    (4000, 20),
]
SHAPES += [
    (20, 4000),
    (96, 1500),
    (1500, 96),
    (300, 70),
    (70, 300),
    (1024, 768),
    (255, 257),
    (48, 48),
    (901, 13),
    (64, 640),
]
# As on the hub.
PUBLISHED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return folder


def transform_of(folder: Path, image_tokens: int = 256) -> ImageTransform:
    size = processed_size(folder, "qwen3_vl", image_tokens)
    assert size is not None
    return ImageTransform.from_folder(folder, size, family="qwen3_vl")


def assert_equal_to_transformers(folder: Path, transform: ImageTransform, data: bytes) -> int:
    """Returns the number of the picture's tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    assert transform.area is not None
    least, most = transform.area
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    size = {"shortest_edge": least, "longest_edge": most}
    theirs = processor(Image.open(io.BytesIO(data)).convert("RGB"), size=size, return_tensors="np")
    ours = transform.decode(data).pixels
    rows, columns = grid_of(ours)
    assert theirs["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    tokens = rows * columns
    assert not ours[tokens:-1].any(), "rows behind the picture's tokens are zero"
    # A token's 32 × 32 pixels are 2 × 2 patches; a patch is [channel, frame, row, column] in transformers.
    patches = normalised(transform, ours[:tokens].reshape(tokens * 32, 32, 3)).reshape(3, tokens, 2, 16, 2, 16)
    patches = patches.transpose(1, 2, 4, 0, 3, 5).reshape(tokens * 4, 3, 1, 16, 16).repeat(2, axis=2)
    difference = np.abs(patches.reshape(tokens * 4, -1) - theirs["pixel_values"])
    assert difference.max() <= 1 / 255 / min(transform.normalisation.std) + 1e-6
    assert difference.mean() < 1e-4
    return tokens


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("image_tokens", [256, 200, 1024])
def test_patches_are_equal_to_transformers(tmp_path: Path, shape: tuple[int, int], image_tokens: int) -> None:
    transform = transform_of(write(tmp_path, **PUBLISHED), image_tokens)
    assert transform.size == (image_tokens + 1, 1024)
    assert assert_equal_to_transformers(tmp_path, transform, encoded(scene(*shape))) <= image_tokens


def test_other_settings_are_equal_to_transformers(tmp_path: Path) -> None:
    write(tmp_path, **PROCESSOR)
    for shape in ((300, 200), (10, 10), (900, 7)):
        assert_equal_to_transformers(tmp_path, transform_of(tmp_path), encoded(scene(*shape)))
    older = {name: value for name, value in PROCESSOR.items() if name != "size"}
    write(tmp_path, **older, min_pixels=8192, max_pixels=65536)
    assert transform_of(tmp_path).area == (8192, 65536)
    assert_equal_to_transformers(tmp_path, transform_of(tmp_path), encoded(scene(70, 90)))


def test_no_picture_takes_more_tokens_than_the_array_has_room_for() -> None:
    drawn = random.Random(3)
    for _ in range(20_000):
        least = drawn.randint(1, 300) * 1024
        most = least + drawn.randint(0, 800) * 1024
        short = drawn.randint(1, 300)
        sides = [short, min(int(short * drawn.choice((1, 2, 40, 199, 200))), 60_000)]
        drawn.shuffle(sides)
        width, height = fitting_size(*sides, least, most)
        assert 0 < width * height <= most_tokens(least, most) * 1024
    assert most_tokens(65536, 256 * 1024) == 256
    assert most_tokens(65536, 200 * 1024) == 200


def test_a_picture_that_is_too_thin_is_refused(tmp_path: Path) -> None:
    transform = transform_of(write(tmp_path, **PUBLISHED))
    with pytest.raises(ImageError, match="over 200 times the other") as refused:
        transform.decode(encoded(scene(201, 1)))
    assert refused.value.reason == "wrong_size"


def test_without_a_file_the_published_settings_are_used(tmp_path: Path) -> None:
    assert processed_size(tmp_path, "qwen3_vl", 256) == (257, 1024)
    transform = ImageTransform.from_folder(tmp_path, (257, 1024), family="qwen3_vl")
    assert transform == transform_of(write(tmp_path, **PUBLISHED))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 14}, "patch_size = 14"),
        ({"merge_size": 1}, "merge_size = 1"),
        ({"do_resize": False}, "do_resize"),
        ({"size": {"shortest_edge": 10, "longest_edge": 65536}}, "shortest_edge = 10"),
        ({"size": {"shortest_edge": 1 << 20, "longest_edge": 65536}}, "least area is greater"),
        ({"size": {"shortest_edge": "x", "longest_edge": 65536}}, "shortest_edge = 'x'"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transform_of(write(tmp_path, **PUBLISHED | fields))


def test_a_grid_that_the_array_has_no_room_for_is_made_smaller() -> None:
    """The process that decodes may have been taken over by a picture."""
    (array,) = examples((11, 1024), (10,))
    assert grid_of(array) == (1, 10)
    for given, expected in (((0, 0), (1, 1)), ((65535, 65535), (10, 1)), ((3, 4), (3, 3)), ((2, 5), (2, 5))):
        assert grid_of(write_grid(array, *given)) == expected


def test_only_whole_tokens_that_fit_are_packed() -> None:
    for size in ((33, 32), (32, 31), (32 * 11, 32)):
        with pytest.raises(ImageError, match="does not make 1 to 10 tokens"):
            pack(Pixels(size, scene(*size).tobytes()), 10)
