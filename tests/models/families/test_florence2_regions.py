"""Florence-2's answers: the regions in them are those that transformers reads, for every task and any text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpoints.florence2_files import processor_of, write_florence2

from snapcap.models.config import ModelConfig
from snapcap.models.fields import ConfigError
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.text import INPUT, Region, Task

BANNED = ["the image", "it", ""]
CONFIG: dict[str, Any] = {
    "ocr": {"AREA_THRESHOLD": 0.01},
    "phrase_grounding": {"banned_grounding_tokens": BANNED},
    **{kind: {} for kind in ("pure_text", "description_with_bboxes", "polygons", "bboxes")},
    "description_with_bboxes_or_polygons": {},
}
SIZES = ((640, 480), (1, 1), (1, 4000), (1333, 777), (999, 1001), (50_000, 3))
LOCATIONS = [f"<loc_{number}>" for number in (0, 1, 2, 7, 250, 333, 499, 500, 667, 998, 999)]
MARKS = ["<sep>", "<poly>", "</poly>", "<s>", "</s>", "<pad>", "<od>", "</od>", "<ground>", "<obj>", "<unk>"]
WORDS = ["cat", " a dog", "the image", "it", " ", "\n", "é", "日本", "<", ">", "loc_5>", "<loc_", "<loc_1234>"]
# Runs of locations are common, and of any length.
PIECES = st.one_of(
    st.lists(st.sampled_from(LOCATIONS), min_size=1, max_size=10).map("".join),
    st.lists(st.sampled_from([*LOCATIONS, *MARKS[:3]]), min_size=3, max_size=14).map("".join),
    st.sampled_from([*WORDS, *MARKS]),
    st.text(max_size=6),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
BOX = "<loc_1><loc_2><loc_3><loc_4>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("florence2")
    write_florence2(folder, {"vocab_size": 1500, "d_model": 40, "max_position_embeddings": 192}, 0, answers=True)
    (folder / "processor_config.json").write_text(json.dumps({"post_processor_config": CONFIG}))
    return folder


@pytest.fixture(scope="module")
def tasks(folder: Path) -> dict[str, Task]:
    return {f"<{task.name.upper()}>": task for task in ModelConfig.from_folder(folder).tasks}


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    """transformers' processor, with the post-processor's configuration of the checkpoint."""
    return processor_of(folder, CONFIG)


def theirs(processor: Any, task: str, size: tuple[int, int], **answer: Any) -> list[tuple[str, object, object]]:
    """(label, box, polygons) of each region that transformers reads. Outlines without a point are left out."""
    found = processor.post_process_generation(task=task, image_size=size, **answer)[task]
    boxes = zip(found.get("bboxes", []), found.get("bboxes_labels", found.get("labels")), strict=False)
    regions: list[tuple[str, object, object]] = [(label, box, []) for box, label in boxes]
    quads = [
        ([quad], label) for quad, label in zip(found.get("quad_boxes", []), found.get("labels", []), strict=False)
    ]
    masks = zip(found.get("polygons", []), found.get("polygons_labels", found.get("labels")), strict=False)
    for outlines, label in (*quads, *masks):
        outlined = [outline for outline in outlines if outline]
        if outlined:
            regions.append((label, bounds(outlined), outlined))
    return regions


def bounds(outlines: list[list[int]]) -> list[int]:
    x, y = ([each for outline in outlines for each in outline[first::2]] for first in (0, 1))
    return [min(x), min(y), max(x), max(y)]


def ours(regions: list[Region]) -> list[tuple[str, object, object]]:
    return [(region.label, [*region.box], [[*outline] for outline in region.polygons]) for region in regions]


def region_tasks(tasks: dict[str, Task]) -> Iterator[tuple[str, Any]]:
    for name, task in tasks.items():
        if task.regions is not None:
            yield name, task.regions


def test_every_kind_of_region_is_read(tasks: dict[str, Task]) -> None:
    assert {name for name, _ in region_tasks(tasks)} == {
        "<OCR_WITH_REGION>",
        "<OD>",
        "<DENSE_REGION_CAPTION>",
        "<REGION_PROPOSAL>",
        "<CAPTION_TO_PHRASE_GROUNDING>",
        "<REFERRING_EXPRESSION_SEGMENTATION>",
        "<REGION_TO_SEGMENTATION>",
        "<OPEN_VOCABULARY_DETECTION>",
    }


@settings(max_examples=600)
@given(TEXTS, st.sampled_from(SIZES))
@example("", SIZES[0])
@example("cat" + BOX, SIZES[0])
@example("cat" + BOX + "<loc_5>dog" + BOX, SIZES[3])
@example(BOX + "dog" + BOX, SIZES[3])
@example(BOX + "<loc_5>" + BOX, SIZES[3])
@example("cat<loc_1><loc_2><loc_3>", SIZES[0])
@example("<<loc_9>" + BOX, SIZES[0])
@example("one line" + 2 * BOX + 3 * BOX + "\nnext" + 2 * BOX, SIZES[0])
@example("cat<sep><poly>" + BOX + "<sep>" + BOX + "</poly><poly><loc_5></poly><poly><loc_7>" + BOX, SIZES[4])
@example("<poly>" + BOX + "<poly></poly><sep>" + BOX + "</poly>" + BOX, SIZES[4])
@example(BOX + "<loc_5><sep><sep>" + BOX + "<poly>" + BOX, SIZES[4])
@example("</poly>" + BOX + "<poly>" + BOX, SIZES[4])
def test_regions_of_any_text_are_those_of_transformers(
    processor: Any, tasks: dict[str, Task], text: str, size: tuple[int, int]
) -> None:
    for name, read in region_tasks(tasks):
        assert ours(read(text, size)) == theirs(processor, name, size, text=text), name


@settings(max_examples=300)
@given(st.lists(st.integers(3, 1499), max_size=40), st.sampled_from(SIZES))
def test_regions_of_any_tokens_are_those_of_transformers(
    folder: Path, processor: Any, tasks: dict[str, Task], tokens: list[int], size: tuple[int, int]
) -> None:
    # The tokens 0, 1 and 2, which our texts omit and transformers removes as letters, are among the texts above.
    marked = Tokenizer.from_folder(folder).with_marks(frozenset({0, 1, 2}))
    text = processor.tokenizer.decode(tokens, skip_special_tokens=False)
    assert marked.answer((), tokens) == text
    stream = marked.stream()
    assert ("".join(map(stream.push, tokens)) + stream.end()) == text
    for name, read in region_tasks(tasks):
        assert ours(read(marked.answer((), tokens), size)) == theirs(processor, name, size, text=text), name
    if tokens and text.isascii():  # of other texts transformers makes letters token by token
        for name, read in region_tasks(tasks):
            assert ours(read(text, size)) == theirs(processor, name, size, sequence=tokens), name
        pure = processor.post_process_generation(sequence=tokens, task="<OCR>")["<OCR>"]
        assert pure == marked.caption((), [2, 0, *tokens, 1, 2])


def test_every_bin_is_the_pixel_of_transformers(processor: Any, tasks: dict[str, Task]) -> None:
    read = tasks["<REGION_PROPOSAL>"].regions
    assert read is not None
    text = "".join(f"<loc_{number}>" for number in range(1000))
    for size in (*SIZES, (4000, 3000), (768, 768), (1920, 1080), (65_535, 65_535)):
        assert ours(read(text, size)) == theirs(processor, "<REGION_PROPOSAL>", size, text=text)


@pytest.mark.parametrize(
    "text",
    [
        "<" * 200_000,
        "a" * 200_000,
        "<loc_" * 40_000,
        "<loc_1" + "1" * 200_000,
        "<poly>" * 30_000,
        "\n" * 100_000 + BOX,
        ("a" + "<loc_1>" * 7) * 20_000,
        "<sep>" * 40_000,
        BOX * 10_000,
    ],
)
def test_a_long_answer_is_read_in_time(tasks: dict[str, Task], text: str) -> None:
    """The patterns of transformers take the square of the length, which is hours here."""
    for _, read in region_tasks(tasks):
        read(text, (640, 480))


def test_a_number_beyond_all_pictures_is_a_million(tasks: dict[str, Task]) -> None:
    for _, read in region_tasks(tasks):
        answers = [
            read(f"cat<loc_0><loc_1>{8 * f'<loc_{number}>'}", (10, 10)) for number in ("9" * 5000, "1000001")
        ]
        assert answers[0] == answers[1]
        assert max((max(region.box) for region in answers[0]), default=10_000) == 10_000


def test_prompts_are_those_of_the_processor(processor: Any, tasks: dict[str, Task]) -> None:
    given = {
        "<REGION_TO_CATEGORY>": "<loc_52><loc_332><loc_932><loc_774>",
        "<OPEN_VOCABULARY_DETECTION>": " a {input} of %s ",
    }
    for name, task in tasks.items():
        text = given.get(name, "a green car") if task.takes_text else ""
        asked = text if name == "<FREE_TEXT>" else name + text
        assert processor._construct_prompts(asked) == [task.text.replace(INPUT, text.strip())]
    everyone = {*processor.task_prompts_without_inputs, *processor.task_prompts_with_input}
    assert {*tasks} - {"<FREE_TEXT>"} == everyone == {*processor.tasks_answer_post_processing_type}
    for name in ("<GENERATE_TAGS>", "<MIXED_CAPTION>", "<ANALYZE>", "<DocVQA>"):
        own = Task.find(name, tasks.values())
        assert own is not None
        assert processor._construct_prompts(name + "why?") == [own.text.replace(INPUT, "why?")]


def test_a_checkpoint_without_a_post_processor_has_the_phrases_of_the_first_ones(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tasks = {task.name: task for task in ModelConfig.from_folder(tmp_path).tasks}
    read = tasks["caption_to_phrase_grounding"].regions
    assert read is not None
    assert [region.label for region in read(f"they{BOX}a group{BOX}a car{BOX}", (9, 9))] == ["a car"]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"ocr": {"AREA_THRESHOLD": "big"}}, r"ocr\.AREA_THRESHOLD = 'big': a number"),
        (
            {"phrase_grounding": {"banned_grounding_tokens": [1]}},
            r"banned_grounding_tokens = \[1\]: a list of texts",
        ),
        ([], r"post_processor_config = \[\]"),
    ],
)
def test_bad_settings_are_refused_by_name(folder: Path, tmp_path: Path, answers: object, said: str) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "processor_config.json").write_text(json.dumps({"post_processor_config": answers}))
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_folder(tmp_path)


def test_a_pattern_of_the_checkpoints_own_is_named_and_not_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    answers = {"ocr": {"PATTERN": "(a+)+$"}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"post_processor_config": answers}))
    assert ModelConfig.from_folder(tmp_path).generation.not_done[-1] == "post_processor_config.ocr.PATTERN = (a+)+$"
