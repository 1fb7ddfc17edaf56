"""The ONNX Runtime peer: the captions, the pixels and the tokens of transformers, without torch in its process."""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.servers.server_process import python

from snapcap.benchmarks.contenders import PEERS
from snapcap.benchmarks.harness.server import Server
from snapcap.benchmarks.harness.workload import FIRST_IMAGE, Workload, open_workload, read_images

PEER = PEERS["onnxruntime"]
pytestmark = pytest.mark.skipif(bool(PEER.missing), reason=f"not installed: {', '.join(PEER.missing)}")
INTEGER = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
FILES = ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of artifact sets, with the demo model's export."""
    folder = tmp_path_factory.mktemp("sets")
    PEER.prepare(open_workload("demo", folder), folder)
    return folder


@pytest.fixture(scope="module")
def workload(sets: Path) -> Workload:
    return open_workload("demo", sets)


@pytest.fixture
def exports_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the command of an export run in this process, which has torch and transformers already. The export of
    ``sets`` runs in a process of its own."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        from snapcap.benchmarks.peers import onnx_export

        try:
            onnx_export.main(*command[3:])
        except Exception:  # as the interpreter does
            return SimpleNamespace(returncode=1)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)


def open_captioner(folder: Path) -> Any:
    from snapcap.benchmarks.peers.onnx_server import Captioner

    return Captioner(folder, threads=1)


def test_samples_get_their_captions_alone_and_together(
    workload: Workload, sets: Path, samples: dict[Path, str]
) -> None:
    captioner = open_captioner(PEER.model(workload, sets))
    images = [captioner.pixels(image.read_bytes()) for image in samples]
    alone = [reply["caption"] for pixels in images for reply in captioner.captions([pixels])]
    together = [reply["caption"] for reply in captioner.captions(images)]
    assert alone == together == list(samples.values())


@pytest.mark.usefixtures("exports_here")
def test_in_int8_samples_get_their_captions(workload: Workload, sets: Path, samples: dict[Path, str]) -> None:
    """The products by weights are counted, as a decoder whose weights were not rounded would caption as well."""
    import onnx

    peer = PEERS["onnxruntime-int8"]
    peer.prepare(workload, sets)
    folder = peer.model(workload, sets)
    captioner = open_captioner(folder)
    replies = captioner.captions([captioner.pixels(image.read_bytes()) for image in samples])
    assert [reply["caption"] for reply in replies] == list(samples.values())
    for name in ("encoder.onnx", "decoder.onnx"):
        nodes: Any = onnx.load(folder / name, load_external_data=False).graph.node
        assert {node.op_type for node in nodes if re.search("MatMul|Gemm", node.op_type)} <= INTEGER


def test_pixels_are_those_of_transformers(workload: Workload, sets: Path, samples: dict[Path, str]) -> None:
    import transformers
    from PIL import Image

    captioner = open_captioner(PEER.model(workload, sets))
    processor: Any = transformers.AutoImageProcessor
    processor = processor.from_pretrained(workload.folder)
    for path in samples:
        with Image.open(path) as picture:
            expected = processor(picture.convert("RGB"), return_tensors="np").pixel_values[0]
        np.testing.assert_allclose(captioner.pixels(path.read_bytes()), expected, atol=1e-6)


@pytest.mark.usefixtures("exports_here")
def test_a_random_model_gets_the_tokens_of_transformers(
    make_captioner: Callable[..., Any], demo_folder: Path, workload: Workload, tmp_path: Path
) -> None:
    """Of widths that differ, so that states are projected between them, and to the limit, as no caption ends."""
    import torch

    model = make_captioner({"hidden_size": 72, "num_hidden_layers": 1}, {"n_layer": 1}, seed=3)
    model.generation_config.update(eos_token_id=None, decoder_start_token_id=1, max_new_tokens=9)
    model.config.eos_token_id = model.config.decoder.eos_token_id = None
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint)
    for name in FILES:
        shutil.copyfile(demo_folder / name, checkpoint / name)
    random = replace(workload, folder=checkpoint)
    PEER.prepare(random, tmp_path)
    captioner = open_captioner(PEER.model(random, tmp_path))
    pixels = np.stack([captioner.pixels(data) for data, _ in read_images(workload.images)])
    expected = model.generate(torch.from_numpy(pixels), do_sample=False, num_beams=1)[:, 1:].tolist()
    assert {len(row) for row in expected} == {9}
    assert captioner.generate(pixels) == expected


@pytest.fixture(scope="module")
def server(workload: Workload, sets: Path) -> Any:
    with closing(Server(PEER.command(workload, "cpu", sets), PEER.api)) as server:
        yield server


def test_batches_of_many_clients_are_answered_right(server: Server, workload: Workload) -> None:
    def ask(image: bytes) -> str:
        connection = server.connect()
        caption: str = server.caption(connection, image).json()["caption"]
        connection.close()
        return caption

    images = read_images(workload.images) * 3
    with ThreadPoolExecutor(12) as clients:
        captions = list(clients.map(ask, [data for data, _ in images]))
    assert captions == [caption for _, caption in images]


def test_there_is_no_torch_in_the_server(server: Server, workload: Workload) -> None:
    connection = server.connect()
    workload.check(server.caption(connection, (workload.images / FIRST_IMAGE).read_bytes()).json())
    connection.close()
    maps = Path(f"/proc/{server.pid}/maps").read_text()
    assert "onnxruntime" in maps
    assert "libtorch" not in maps
    assert "/torch/" not in maps


# What the server does, in one process that can say what it has imported.
_SERVE = """
import json, sys
from pathlib import Path
from snapcap.benchmarks.peers import onnx_server as server
import uvicorn
captioner = server.Captioner(Path(sys.argv[1]), threads=1)
app = server.create_app(captioner.pixels, captioner.captions, 8)
print(captioner.captions([captioner.pixels(Path(sys.argv[2]).read_bytes())])[0]["caption"])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_the_server_imports_neither_torch_nor_transformers(
    workload: Workload, sets: Path, samples: dict[Path, str]
) -> None:
    image, caption = next(iter(samples.items()))
    run = python("-c", _SERVE, str(PEER.model(workload, sets)), str(image))
    text, modules = run.stdout.splitlines()
    assert text == caption
    assert "onnxruntime" in json.loads(modules)
    assert not {"torch", "transformers", "onnx", "onnxscript"} & set(json.loads(modules))


def test_an_export_is_made_once(workload: Workload, sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("exported again"))
    PEER.prepare(workload, sets)


@pytest.mark.usefixtures("exports_here")
def test_an_export_that_fails_says_why(workload: Workload, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"onnx_export .*ended with status 1"):
        PEER.prepare(replace(workload, folder=tmp_path), tmp_path)
    assert not [path for path in tmp_path.glob("onnx/**/*") if path.is_file()]
