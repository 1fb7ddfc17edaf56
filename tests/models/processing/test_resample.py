import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from snapcap.models.processing.resample import SOURCES, Resampler, resized
from snapcap.models.processing.transform import ImageTransform
from snapcap.warmup.artifacts.manifest import IMAGE_LIBRARY
from snapcap.warmup.build.library_worker import compile_library, compiler_options
from snapcap.warmup.machine.capacity import CPUINFO
from snapcap.warmup.machine.installation import require_compiler

SAMPLES = Path(__file__).parents[3] / "models" / "demo" / "samples"
FILTERS = (0, 1, 2, 3, 4, 5)


def compiled(folder: Path, source: Path, options: list[str]) -> Path:
    made = folder / "made.so"
    subprocess.run([require_compiler(), *options, "-o", str(made), str(source)], check=True, timeout=120)
    return made


@pytest.fixture(scope="session", params=["avx512_vnni", "avx2", "any processor"])
def resampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resampler:
    """Gives the library with each of the instruction sets for which it has code of its own."""
    folder = tmp_path_factory.mktemp("library")
    options = compiler_options(SOURCES)
    if request.param == "any processor":
        options.remove("-march=native")
    elif request.param not in CPUINFO.read_text().split():
        pytest.skip(f"this processor lacks {request.param}")
    elif request.param == "avx2":
        options.append("-mno-avx512f")
    if request.param == "avx512_vnni":
        compile_library(folder, IMAGE_LIBRARY)
        library = folder / IMAGE_LIBRARY
    else:
        library = compiled(folder, SOURCES / "resample.cpp", options)
    opened = Resampler.open(str(library))
    assert opened is not None
    return opened


def picture(size: tuple[int, int], chance: random.Random) -> Image.Image:
    noise = np.random.default_rng(chance.randrange(1 << 30)).integers(0, 256, (size[1], size[0], 3), np.uint8)
    if chance.random() < 0.5:  # edges, at which sums are below 0 and above 255
        noise = (noise > 127).astype(np.uint8) * np.uint8(255)
    return Image.fromarray(noise)


def check(
    resampler: Resampler,
    image: Image.Image,
    filter_: int,
    *sizes: tuple[int, int],
    box: tuple[float, float, float, float] | None = None,
) -> None:
    ours, pillows = (resized(image, filter_, sizes, box, each) for each in (resampler, None))
    assert ours.size == pillows.size == sizes[-1]
    assert ours.data == pillows.data, (image.size, filter_, sizes, box)


@pytest.mark.parametrize("filter_", FILTERS)
def test_pictures_come_out_as_pillow_makes_them(resampler: Resampler, filter_: int) -> None:
    chance = random.Random(filter_)
    for most in (4, 40, 400):
        for _ in range(12):
            image = picture((chance.randint(1, most), chance.randint(1, most)), chance)
            sizes = [(chance.randint(1, 300), chance.randint(1, 300)) for _ in range(chance.randint(1, 2))]
            check(resampler, image, filter_, *sizes)


@pytest.mark.parametrize("filter_", FILTERS)
def test_a_part_of_a_picture_comes_out_as_pillow_makes_it(resampler: Resampler, filter_: int) -> None:
    chance = random.Random(filter_)
    for _ in range(12):
        width, height = chance.randint(1, 200), chance.randint(1, 200)
        part = (chance.uniform(0, width / 2), 0.0, width - chance.uniform(0, width / 2.01), height - 0.125)
        box = tuple(float(np.float32(edge)) for edge in part)
        check(resampler, picture((width, height), chance), filter_, (37, 50), box=(box[0], box[1], box[2], box[3]))


@pytest.mark.parametrize(
    ("size", "sizes", "filter_"),
    [
        ((500, 375), [(2048, 1536), (512, 512)], 1),
        ((375, 500), [(1536, 2048), (512, 512)], 1),
        ((120, 500), [(492, 2048), (512, 512)], 1),  # begins with the pass from line to line
        ((500, 375), [(768, 768)], 3),
        ((500, 375), [(384, 384)], 3),
        ((500, 375), [(224, 224)], 2),
        ((3000, 2000), [(336, 224)], 3),
        ((1, 1), [(224, 224)], 2),
        ((1, 1), [(2048, 2048), (512, 512)], 1),
        ((2000, 10), [(224, 224)], 2),
        ((10, 2000), [(2, 400), (64, 64)], 3),
        ((200, 3), [(31, 2048), (512, 512)], 1),
        ((40, 4000), [(40, 7)], 1),  # thousands of samples make one
        ((224, 224), [(224, 224)], 2),  # nothing to do
        ((224, 224), [(224, 224), (224, 100)], 2),
    ],
)
def test_sizes_of_the_families_come_out_as_pillow_makes_them(
    resampler: Resampler, size: tuple[int, int], sizes: list[tuple[int, int]], filter_: int
) -> None:
    check(resampler, picture(size, random.Random(0)), filter_, *sizes)


@pytest.mark.parametrize(
    "transform",
    [
        ImageTransform((224, 224)),
        ImageTransform((64, 64), resample=1, longest_edge=256),
        ImageTransform((96, 96), resample=3, resize_to=100, do_center_crop=True),
    ],
    ids=["one resize", "two resizes", "crop"],
)
def test_a_transform_gives_the_same_pixels_with_it(resampler: Resampler, transform: ImageTransform) -> None:
    from dataclasses import replace

    faster = replace(transform, resampler=resampler)
    files = [*sorted(SAMPLES.glob("*.png"))[:2], Path(__file__).parents[3] / "service" / "images" / "sample.jpg"]
    for file in files:
        data = file.read_bytes()
        assert (faster.decode(data).pixels == transform.decode(data).pixels).all(), file.name
        with Image.open(file) as image:
            assert (faster.convert(image) == transform.convert(image)).all(), file.name


def test_turned_jpegs_of_a_camera_come_out_the_same(resampler: Resampler, tmp_path: Path) -> None:
    """They are decoded at a fraction of their size, of which the picture fills a part."""
    from dataclasses import replace

    plain = ImageTransform((64, 64), resample=1, longest_edge=128)
    exif = Image.Exif()
    for turn in (1, 6):
        exif[0x0112] = turn
        file = tmp_path / f"{turn}.jpg"
        picture((1003, 805), random.Random(turn)).save(file, exif=exif)
        data = file.read_bytes()
        assert (replace(plain, resampler=resampler).decode(data).pixels == plain.decode(data).pixels).all()


def test_a_library_that_gives_other_pixels_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int snapcap_resize(...) { return 0; }')
    assert Resampler.open(str(compiled(tmp_path, source, ["-shared", "-fPIC"]))) is None
    assert Resampler.open(str(source)) is None
    reasons = [record.__dict__["fields"]["reason"] for record in caplog.records]
    assert reasons[0] == "its results are not those of this Pillow"
    assert "other.cpp" in reasons[1]


def test_running_out_of_memory_is_pythons_error(resampler: Resampler) -> None:
    with pytest.raises(MemoryError):
        resampler.resized(Image.new("RGB", (4, 4)), 9, [(2, 2)])  # the library serves no such filter
