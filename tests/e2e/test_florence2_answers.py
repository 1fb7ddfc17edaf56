"""Florence-2's answers through a server, the library and the command: the regions that transformers reads."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from PIL import Image, ImageOps
from support.checkpoints.florence2_files import processor_of, write_florence2
from support.parity.pictures import encoded, scene
from support.servers.server_process import ServerProcess, snapcap

from snapcap import Captioner, CaptionError

KINDS = ("pure_text", "ocr", "description_with_bboxes", "phrase_grounding", "polygons", "bboxes")
ANSWERS: dict[str, Any] = {kind: {} for kind in (*KINDS, "description_with_bboxes_or_polygons")}
PLACE = "<loc_52><loc_332><loc_932><loc_774>"
# Each kind of task, and a task that only a fine-tuned checkpoint knows. With a text where the task takes one.
TASKS = {
    "<OCR>": "",
    "<OCR_WITH_REGION>": "",
    "<OD>": "",
    "<REGION_PROPOSAL>": "",
    "<CAPTION_TO_PHRASE_GROUNDING>": "a green car in the image",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "a green car",
    "<OPEN_VOCABULARY_DETECTION>": "a green car",
    "<REGION_TO_CATEGORY>": PLACE,
    "<GENERATE_TAGS>": "",
}
JSON = {"Content-Type": "application/json"}
OPTIONS = ("--backend", "eager", "--buckets", "1,4", "--text-tokens", "40")
SHARED: dict[str, Any] = {"max_new_tokens": 40, "num_beams": 1, "no_repeat_ngram_size": 0}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("florence2")
    text = {"vocab_size": 1500, "d_model": 40, "max_position_embeddings": 192, "encoder_layers": 1}
    write_florence2(folder, text, seed=1, answers=True)
    (folder / "processor_config.json").write_text(json.dumps({"post_processor_config": ANSWERS}))
    return folder


@pytest.fixture(scope="module")
def image() -> bytes:
    """A JPEG of 150×100 pixels that lies on its side: upright it has 100×150."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(scene(150, 100, 7), "JPEG", exif=exif.tobytes())


@pytest.fixture(scope="module")
def expected(folder: Path, image: bytes) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """transformers' answer to each task: the text, and the regions in its words."""
    from transformers import Florence2ForConditionalGeneration

    processor = processor_of(folder, ANSWERS)
    model = Florence2ForConditionalGeneration.from_pretrained(folder).eval()
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(image))).convert("RGB")
    assert upright.size == (100, 150)
    found: dict[str, tuple[str, dict[str, Any] | None]] = {}
    for task, text in TASKS.items():
        inputs = processor(text=task + text, images=upright, return_tensors="pt")
        output = model.generate(**inputs, early_stopping=False, **SHARED)
        whole = processor.decode(output[0], skip_special_tokens=False)
        answer = processor.post_process_generation(whole, task=task, image_size=upright.size)[task]
        bare = whole.replace("<s>", "").replace("</s>", "").replace("<pad>", "").strip()
        found[task] = (bare, None) if isinstance(answer, str) else (bare, answer)
    assert sum(bool(regions and any(regions.values())) for _, regions in found.values()) > 2, "some have regions"
    return found


def query(task: str) -> str:
    given = {**SHARED, "task": task, "task_text": TASKS[task]}
    return urlencode(given)


def assert_regions(given: list[dict[str, Any]] | None, expected: dict[str, Any] | None) -> None:
    if expected is None:
        assert given is None
        return
    assert given is not None
    polygons = expected.get("polygons") or [[quad] for quad in expected.get("quad_boxes", [])]
    labels = [*expected.get("labels", []), *expected.get("bboxes_labels", []), *expected.get("polygons_labels", [])]
    polygons = [(outlines, label) for outlines, label in zip(polygons, labels, strict=False)]
    boxes = list(zip(expected.get("bboxes", []), labels, strict=False))
    outlined = [(outlines, label) for outlines, label in polygons if any(outlines)]
    assert [(each["polygons"], each["label"]) for each in given if "polygons" in each] == outlined
    assert [(each["box"], each["label"]) for each in given if "polygons" not in each] == boxes


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache = tmp_path_factory.mktemp("cache")
    with ServerProcess("--model", str(folder), "--cache-dir", str(cache), *OPTIONS) as server:
        yield server.wait_ready()


def test_each_kind_of_task_is_answered_as_by_transformers(
    server: ServerProcess, image: bytes, expected: dict[str, Any]
) -> None:
    assert {task.strip("<>").lower() for task in TASKS} - {"generate_tags"} <= {*server.startup()["tasks"]}
    for task, (text, regions) in expected.items():
        status, reply, _ = server.call(f"/v1/caption?{query(task)}", image)
        assert (status, reply["caption"]) == (200, text), (task, reply)
        assert_regions(reply.get("regions"), regions)


def test_a_streamed_caption_ends_with_its_regions(
    server: ServerProcess, image: bytes, expected: dict[str, Any]
) -> None:
    text, regions = expected["<REGION_PROPOSAL>"]
    path = f"/v1/caption?{query('<REGION_PROPOSAL>')}"
    *pieces, last = events(server.call(path, image, {"Accept": "text/event-stream"})[1])
    assert "".join(piece["text"] for piece in pieces) == last["caption"] == text
    assert_regions(last["regions"], regions)


def test_a_chat_has_regions_whole_and_streamed(
    server: ServerProcess, image: bytes, expected: dict[str, Any]
) -> None:
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    for task, (text, regions) in expected.items():
        body = {"messages": [message], "task": task, "task_text": TASKS[task], **SHARED}
        whole, streamed = (
            server.call("/v1/chat/completions", json.dumps({**body, "stream": stream}).encode(), JSON)[1]
            for stream in (False, True)
        )
        assert whole["choices"][0]["message"]["content"] == text, task
        assert_regions(whole.get("regions"), regions)
        *chunks, last = events(streamed.removesuffix("data: [DONE]\n\n"))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
        assert_regions(last.get("regions"), regions)
        assert not any("regions" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("task", "text", "said"),
    [
        ("<OD>", "a cat", "takes no text"),
        ("region_to_ocr", "", "'task_text' must be given"),
        ("no_task", "", "must be one of caption, "),
        ("free_text", "cat " * 40, "the encoder takes 40; `--text-tokens"),
    ],
)
def test_what_a_task_cannot_take_is_refused(
    server: ServerProcess, image: bytes, task: str, text: str, said: str
) -> None:
    given = urlencode({"task": task, "task_text": text})
    status, reply, _ = server.call(f"/v1/caption?{given}", image)
    assert status == 422
    assert said in reply["detail"]


def events(stream: str) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in stream.split("\n\n") if event]


def test_the_library_gives_regions_of_each_form_of_an_image(
    folder: Path, tmp_path: Path, image: bytes, expected: dict[str, Any]
) -> None:
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(image)))
    given: dict[str, Any] = {"task": "region_proposal", **SHARED}
    text, regions = expected["<REGION_PROPOSAL>"]
    with Captioner(folder, backend="eager", buckets=(1, 4), text_tokens=40, cache_dir=tmp_path) as captioner:
        for form in (image, Image.open(io.BytesIO(image)), upright):
            caption = captioner(form, **given)
            assert caption.text == text
            assert caption.regions is not None
            assert_regions([region.to_dict() for region in caption.regions], regions)
        assert [each.regions for each in captioner.batch([image], **given)] == [caption.regions]  # type: ignore[union-attr]
        assert "".join(captioner.stream(image, **given)) == text
        assert captioner(image).regions is None
        with pytest.raises(CaptionError, match="takes no text"):
            captioner(image, task="od", task_text="a cat")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_command_writes_regions(
    folder: Path, tmp_path: Path, image: bytes, expected: dict[str, Any], ending: str
) -> None:
    (tmp_path / "a.jpg").write_bytes(image)
    output = tmp_path / f"captions.{ending}"
    sampled = ("--max-new-tokens", "40", "--num-beams", "1", "--no-repeat-ngram-size", "0")
    task = ("--task", "caption_to_phrase_grounding", "--task-text", TASKS["<CAPTION_TO_PHRASE_GROUNDING>"])
    options = ("--model", str(folder), "--cache-dir", str(tmp_path), *OPTIONS, *task, *sampled)
    run = snapcap("caption", str(tmp_path / "a.jpg"), "--output", str(output), *options)
    assert run.returncode == 0, run.stderr
    text, regions = expected["<CAPTION_TO_PHRASE_GROUNDING>"]
    if ending == "jsonl":
        (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    else:
        from pyarrow import parquet

        (row,) = parquet.read_table(output).to_pylist()
        row["regions"] = json.loads(row["regions"])
    assert row["caption"] == text
    assert_regions(row["regions"], regions)
