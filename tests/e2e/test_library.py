"""`from snapcap import Captioner`: the server's engine in somebody's own process."""

import gc
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.servers.server_process import python

from snapcap import Caption, Captioner, CaptionError, UserError
from snapcap.service.captioning.options import OptionValues
from snapcap.service.config.reader import SettingsError, settings_of
from snapcap.service.config.settings import Settings


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captioner]:
    cache = tmp_path_factory.mktemp("cache")
    with Captioner("demo", backend="eager", buckets=(1, 4), threads=2, cache_dir=cache) as opened:
        yield opened


@pytest.fixture
def sample(samples: dict[Path, str]) -> tuple[Path, str]:
    return next(iter(samples.items()))


def test_an_image_in_each_of_its_forms(captioner: Captioner, sample: tuple[Path, str]) -> None:
    path, text = sample
    data = path.read_bytes()
    at_its_end = io.BytesIO()
    at_its_end.write(data)
    files = (path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), at_its_end)
    picture = Image.open(path)
    array = np.asarray(picture.convert("RGB"))
    padded = np.zeros((array.shape[0], array.shape[1] + 5, 4), np.uint8)
    padded[:, 5:, :3] = array
    for image in (*files, picture, picture.convert("RGBA"), array, padded[:, 5:, :3]):
        caption = captioner(image)
        assert (caption.text, str(caption), caption.finish_reason) == (text, text, "stop")
        assert caption.backend == captioner.backend == "eager"
        assert caption.tokens > 1
        assert caption.seconds > 0
    assert captioner.device == "cpu"


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((8, 8, 3), np.float32), "not float32, 8 × 8 × 3"),
        (np.zeros((8, 8, 4), np.uint8), "not uint8, 8 × 8 × 4"),
        (np.zeros((8, 8), np.uint8), "not uint8, 8 × 8"),
        (np.zeros((0, 8, 3), np.uint8), "not uint8, 0 × 8 × 3"),
        (np.zeros((1, 8, 8, 3), np.uint8), "not uint8, 1 × 8 × 8 × 3"),
        (np.uint8(3), "not uint8, a number"),
    ],
)
def test_another_array_is_refused_with_a_sentence(captioner: Captioner, array: Any, said: str) -> None:
    sentence = f"an array must be uint8, height × width × 3 (RGB), {said}"
    with pytest.raises(CaptionError, match=re.escape(sentence)):
        captioner(array)
    assert [str(each) for each in captioner.batch([array])] == [sentence]


def test_one_image_is_no_batch(captioner: Captioner, sample: tuple[Path, str]) -> None:
    path, text = sample
    picture = Image.open(path)
    array = np.asarray(picture.convert("RGB"))
    for one in ("photos", path, path.read_bytes(), io.BytesIO(), picture, array, 5):
        with pytest.raises(CaptionError, match="batch takes a list or another iterable of images, not one"):
            captioner.batch(one)  # type: ignore[arg-type]
    for many in (np.stack([array, array]), np.array([str(path)] * 2), (path, path), {path: 1, str(path): 2}):
        assert [str(each) for each in captioner.batch(many)] == [text, text]


def test_what_a_batch_was_given_may_be_changed_when_the_next_is_taken(
    captioner: Captioner, sample: tuple[Path, str]
) -> None:
    path, text = sample
    data, array = path.read_bytes(), np.asarray(Image.open(path).convert("RGB"))

    def reused() -> Iterator[Any]:
        buffer, file, frame = bytearray(data), io.BytesIO(data), array.copy()
        for _ in range(8):
            buffer[:], frame[:] = data, array
            yield buffer
            buffer[:] = bytes(len(data))
            yield frame
            frame[:] = 0
            yield file
        file.close()
        yield file

    *captions, last = (str(each) for each in captioner.batch(reused()))
    assert set(captions) == {text}
    assert "closed file" in last


def test_it_tells_what_it_is(captioner: Captioner) -> None:
    assert repr(captioner) == "<Captioner demo on cpu, eager, batches of at most 4>"
    for option in OptionValues.__annotations__:
        assert f"``{option}``" in (Captioner.__doc__ or "")


def test_an_image_of_pillows_is_turned_as_its_file_says(captioner: Captioner, sample: tuple[Path, str]) -> None:
    path, text = sample
    turned = Image.open(path).convert("RGB").transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6
    assert captioner(turned).text == text


def test_options_are_those_of_the_api(captioner: Captioner, sample: tuple[Path, str]) -> None:
    path, text = sample
    assert captioner(path, num_beams=4).text
    short = captioner(path, max_new_tokens=2)
    assert (short.tokens, short.finish_reason) == (2, "length")
    first = text.split()[0]
    assert captioner(path, prompt=first).text.startswith(first)
    seeded = [captioner(path, temperature=1.5, seed=3).text for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_a_timeout_counts_from_when_the_image_is_read(
    captioner: Captioner, sample: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = sample
    pixels = captioner._pixels

    def slow(image: object) -> object:
        time.sleep(0.2)
        return pixels(image)

    monkeypatch.setattr(captioner, "_pixels", slow)
    with pytest.raises(CaptionError, match="time limit"):
        captioner(path, timeout=0.2)
    assert captioner(path, timeout=60).text == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 99}, "num_beams"),
        ({"beams": 2}, "There is no option 'beams'"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_new_tokens": 60_000}, "max_new_tokens"),
        ({"timeout": 1e-9}, "time"),
    ],
)
def test_an_option_that_cannot_be_is_named(
    captioner: Captioner, sample: tuple[Path, str], options: dict[str, object], said: str
) -> None:
    with pytest.raises(CaptionError, match=said):
        captioner(sample[0], **options)
    if "timeout" not in options:
        with pytest.raises(CaptionError, match=said):
            captioner.batch([], **options)


def test_a_batch_has_a_value_for_each_image_in_order(
    captioner: Captioner, samples: dict[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "damaged.jpg").write_bytes(b"\xff\xd8\xff")
    images, expected = [], []
    for turn in range(40):
        path, text = list(samples.items())[turn % len(samples)]
        images.append(path if turn % 2 else path.read_bytes())
        expected.append(text)
    images[7], images[20], images[33] = tmp_path / "damaged.jpg", tmp_path / "none.jpg", 5
    found = list(captioner.batch(iter(images)))
    assert [each.text if isinstance(each, Caption) else None for each in found] == [
        None if turn in (7, 20, 33) else text for turn, text in enumerate(expected)
    ]
    errors = [str(found[turn]) for turn in (7, 20, 33)]
    assert "incomplete or damaged" in errors[0]
    assert errors[1] == f"{tmp_path / 'none.jpg'}: No such file or directory"
    assert errors[2].startswith("int is no image; give")


def test_a_batch_takes_no_more_images_than_it_needs_ahead(captioner: Captioner, sample: tuple[Path, str]) -> None:
    taken = 0

    def endless() -> Iterator[Path]:
        nonlocal taken
        while True:
            taken += 1
            yield sample[0]

    batch = captioner.batch(endless())
    assert [str(next(batch)) for _ in range(3)] == [sample[1]] * 3
    assert taken < 40
    batch.close()
    assert str(captioner(sample[0])) == sample[1]


def test_a_batch_fills_the_largest_bucket(captioner: Captioner, sample: tuple[Path, str]) -> None:
    buckets: list[int] = []
    engine, images = captioner._model.engine, 32
    engine_encode = engine._encode

    def encode(runner, admitted, *more):
        """Begins when as many images wait as fill the next bucket, however slowly this machine decodes images."""
        nonlocal images
        images -= len(admitted)
        until = time.monotonic() + 20
        while engine._scheduler.depth < min(4, images) and time.monotonic() < until:
            time.sleep(0.002)
        encoded = engine_encode(runner, admitted, *more)
        buckets.append(encoded.bucket)
        return encoded

    engine._encode = encode
    try:
        list(captioner.batch([sample[0]] * images))
    finally:
        del engine._encode
    assert buckets.count(4) >= len(buckets) // 2


def test_a_stream_is_the_caption_in_pieces(captioner: Captioner, sample: tuple[Path, str]) -> None:
    path, text = sample
    pieces = list(captioner.stream(path))
    assert len(pieces) > 3
    assert "".join(pieces) == text
    first = text.split()[0]
    assert first + "".join(captioner.stream(path, prompt=first)) == captioner(path, prompt=first).text
    short = captioner(path, max_chars=24).text
    assert "".join(captioner.stream(path, max_chars=24, trim_lead=True)) == short
    assert text.startswith(f"{short} ")
    with pytest.raises(CaptionError, match="'num_beams' must be 1 for a stream"):
        captioner.stream(path, num_beams=2)
    with pytest.raises(CaptionError, match="not an image"):
        list(captioner.stream(b"text"))
    begun = captioner.stream(path)
    next(begun)
    begun.close()
    assert captioner(path).text == text


def test_many_threads_share_one(captioner: Captioner, samples: dict[Path, str]) -> None:
    pictures = list(samples.items()) * 4
    with ThreadPoolExecutor(16) as pool:
        assert [each.text for each in pool.map(captioner, [path for path, _ in pictures])] == [
            text for _, text in pictures
        ]


def test_one_image_of_pillows_may_be_asked_for_by_many(captioner: Captioner, sample: tuple[Path, str]) -> None:
    """Pillow loads the pixels of a file when they are first asked for."""
    path, text = sample
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            image = Image.open(path)
            assert {each.text for each in pool.map(captioner, [image] * 8)} == {text}
            assert {str(each) for each in captioner.batch([Image.open(path)] * 4)} == {text}


def test_an_image_may_be_closed_when_the_next_is_asked_for(captioner: Captioner, sample: tuple[Path, str]) -> None:
    path, text = sample

    def opened() -> Iterator[Image.Image]:
        for _ in range(30):
            with Image.open(path) as image:
                yield image

    assert {str(each) for each in captioner.batch(opened())} == {text}


def test_a_stream_that_is_dropped_was_never_begun(captioner: Captioner, sample: tuple[Path, str]) -> None:
    asked: list[object] = []
    submit = captioner._model.engine.submit
    captioner._model.engine.submit = lambda request: (asked.append(request), submit(request))[1]
    try:
        captioner.stream(sample[0]).close()
        assert asked == []
        assert "".join(captioner.stream(sample[0])) == sample[1]
        assert len(asked) == 1
    finally:
        del captioner._model.engine.submit


def test_an_engine_that_has_ended_says_why(sample: tuple[Path, str], tmp_path: Path) -> None:
    with Captioner(backend="eager", buckets=(1,), cache_dir=tmp_path) as one:

        def lost() -> None:
            raise RuntimeError("the device fell off the bus")

        one._model.engine._encode = lambda runner, admitted: lost()
        first = [str(each) for each in one.batch([sample[0]] * 12)]
    told = {"the device failed; the log of snapcap.engine has the cause"}
    ended = {each for each in first if each.startswith("the engine has ended: the device failed 3 times in a row")}
    assert ended
    assert {*first} == told | ended


def test_nothing_hangs_where_nobody_closes_it(sample: tuple[Path, str], tmp_path: Path) -> None:
    code = (
        "import sys; from snapcap import Captioner\n"
        "one = Captioner(backend='eager', buckets=(1,), cache_dir=sys.argv[1])\n"
        "stream = one.stream(sys.argv[2]); next(stream); batch = one.batch([sys.argv[2]] * 50); next(batch)\n"
        "print('end')"
    )
    run = python("-c", code, str(tmp_path), str(sample[0]))
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "end", "")


def test_a_start_without_artifacts_names_the_command_that_makes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), Captioner(buckets=(1,), cache_dir=tmp_path) as one:
        assert one.backend == "eager"
    (record,) = [each for each in caplog.records if each.message == "no artifacts"]
    fields = vars(record)["fields"]
    assert (fields["backend"], "serving" in fields) == ("eager", False)
    assert fields["remedy"] == "run `snapcap build` with the same options"


def test_none_is_an_option_that_is_not_given(tmp_path: Path) -> None:
    chosen = settings_of(
        {"model": "demo", "buckets": (), "store": None, "trusted_key": []}, ("model", "compute", "store")
    )
    assert chosen == Settings()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads
def test_a_forked_process_is_told_to_make_its_own(captioner: Captioner, sample: tuple[Path, str]) -> None:
    """No thread of a Captioner comes along, so a caption never comes and a lock may never be free."""
    path, text = sample
    batch = captioner.batch([path] * 40)
    next(batch)

    def answers() -> Iterator[str]:
        for ask in (lambda: captioner(path), lambda: next(batch)):
            try:
                yield str(ask())
            except CaptionError as error:
                yield str(error)

    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(30)  # against for ever
        try:
            os.write(theirs, "|".join(answers()).encode())
            captioner.close()
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as said:
        first, second = said.read().decode().split("|")
    assert os.waitpid(child, 0)[1] == 0
    assert (
        first
        == second
        == ("this Captioner belongs to the process that made it; make another in each process that is forked")
    )
    assert captioner(path).text == text


def test_an_interrupted_start_leaves_no_engine(tmp_path: Path) -> None:
    """In a notebook the interpreter goes on after Ctrl-C, and the model would stay in memory."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from snapcap import Captioner\n"
        "from snapcap.service.offline import feed\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "load = feed.DeviceThread._run\n"
        "def run(self):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.2)\n"
        "    load(self)\n"
        "feed.DeviceThread._run = run\n"
        "try:\n"
        "    Captioner(backend='eager', buckets=(1,), cache_dir=sys.argv[1])\n"
        "except KeyboardInterrupt:\n"
        "    until = time.monotonic() + 60\n"
        "    while threading.active_count() > 1 and time.monotonic() < until: time.sleep(0.05)\n"
        "    print([each.name for each in threading.enumerate()])"
    )
    run = python("-c", code, str(tmp_path))
    assert (run.returncode, run.stdout.strip()) == (0, "['MainThread']"), run.stderr


def test_an_error_does_not_keep_its_image(captioner: Captioner) -> None:
    """A folder with a thousand broken photos would otherwise hold all of them in memory."""
    data = bytes(range(256)) * 8
    before = sys.getrefcount(data)
    gc.disable()
    try:
        errors = list(captioner.batch([data] * 5))
        until = time.monotonic() + 20
        while sys.getrefcount(data) > before and time.monotonic() < until:  # a decode thread goes on to its next
            time.sleep(0.01)
        assert sys.getrefcount(data) == before
    finally:
        gc.enable()
    assert all(isinstance(error, CaptionError) for error in errors)


def test_what_is_closed_says_so(sample: tuple[Path, str], tmp_path: Path) -> None:
    before = threading.active_count()
    with Captioner(backend="eager", buckets=(1,), cache_dir=tmp_path) as one:
        batch = one.batch([sample[0]] * 3)
        assert str(next(batch)) == sample[1]
    one.close()
    assert repr(one) == "<Captioner demo, closed>"
    with pytest.raises(CaptionError, match="closed"):
        one(sample[0])
    assert [str(each) for each in batch] == [sample[1]] * 2
    assert threading.active_count() == before


def test_a_batch_goes_on_where_another_thread_closes_it(sample: tuple[Path, str], tmp_path: Path) -> None:
    """A large array takes a while to copy, and the Captioner is closed meanwhile."""

    class Large(np.ndarray[Any, Any]):
        def copy(self, *_: object, **__: object) -> Any:
            closing = threading.Thread(target=one.close)
            closing.start()
            closing.join()
            return np.ndarray.copy(self)

    path, text = sample
    array = np.asarray(Image.open(path).convert("RGB")).view(Large)
    with Captioner(backend="eager", buckets=(1,), cache_dir=tmp_path) as one:
        assert [str(each) for each in one.batch([path, array, path])] == [
            text,
            *["this Captioner is closed; make another"] * 2,
        ]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"devise": "cpu"}, SettingsError, "unknown option devise; did you mean device"),
        ({"backend": "fast"}, SettingsError, "backend must be one of auto, aot, jit, eager, not 'fast'"),
        ({"buckets": [4, 1]}, SettingsError, "buckets must be batch sizes in increasing order"),
        ({"port": 8000}, SettingsError, "unknown option port"),
        ({"model": "./no-such-folder"}, UserError, "there is no folder"),
        ({"device": "cuda:77"}, UserError, "cuda:77"),
        ({"strict": True, "backend": "aot"}, UserError, "."),
    ],
)
def test_what_cannot_be_started_says_why(
    options: dict[str, object], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        Captioner(**{"cache_dir": tmp_path, **options})


def test_compiled_packages_are_used_as_the_server_does(built_cache: Path, sample: tuple[Path, str]) -> None:
    code = (
        "import sys; from snapcap import Captioner\n"
        "with Captioner(cache_dir=sys.argv[1], buckets=(1, 4)) as one:\n"
        "    loaded = {'torch._inductor.compile_fx', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "    print(one.backend, one(sys.argv[2]), sorted(loaded))"
    )
    run = python("-c", code, str(built_cache), str(sample[0]))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == f"aot {sample[1]} []"


def test_mypy_knows_the_options_of_a_caption(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import io\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from snapcap.captioner import Captioner\n"
        "with Captioner('demo', device='cpu') as captioner:\n"
        "    captioner(Path('a.jpg'), num_beams=4, early_stopping='never', prompt=None)\n"
        "    captioner.batch([b'', io.BytesIO(), np.zeros((2, 2, 3), np.uint8)], top_p=0.5)\n"
        "    captioner('a.jpg', nun_beams=4)\n"
        "    captioner.batch(['a.jpg'], num_beams='4')\n"
        "    captioner.stream('a.jpg', early_stopping='always')\n"
    )
    # Imports of other modules are skipped: mypy would read all of torch for a minute.
    root = Path(__file__).parents[2]
    options = ("--config-file=", "--follow-imports=skip", "--ignore-missing-imports", f"--cache-dir={tmp_path}")
    modules = ("-m", "snapcap.captioner", "-m", "snapcap.service.captioning.options", "-m", "program")
    command = [sys.executable, "-m", "mypy", *options, *modules]
    environment = {**os.environ, "MYPYPATH": str(tmp_path)}
    run = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    errors = [line.partition("program.py:")[2] for line in run.stdout.splitlines() if "program.py:" in line]
    assert [error for error in errors if " note: " not in error] == [
        '8: error: Unexpected keyword argument "nun_beams" for "__call__" of "Captioner"; did you mean "num_beams"?'
        "  [call-arg]",
        '9: error: Argument "num_beams" to "batch" of "Captioner" has incompatible type "str"; '
        'expected "int | None"  [arg-type]',
        '10: error: Argument "early_stopping" to "stream" of "Captioner" has incompatible type '
        "\"Literal['always']\"; expected \"bool | Literal['never'] | None\"  [arg-type]",
    ], run.stdout + run.stderr


def test_importing_it_imports_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import snapcap; print(*sorted(set(sys.modules) - before))\n"
        "snapcap.Captioner"
    )
    run = python("-c", code)
    imported = set(run.stdout.split())
    assert {name for name in imported if name.startswith("snapcap")} == {"snapcap"}, run.stderr
    assert not imported & {"torch", "numpy", "fastapi", "asyncio", "PIL", "pydantic"}
    assert run.returncode == 0, run.stderr
