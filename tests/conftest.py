"""Provides the demo model with its artifacts, and random captioners of any shape, to all tests."""

import fcntl
import gc
import io
import json
import logging
import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores, and a server beside the test
# OpenMP's threads of the programs that tests start sleep while they wait, as those of a server do
# (load_torch_libraries). By default these threads spin, and keep the CPUs from the tests of other workers.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.build_folders import key_of, take_packages
from support.checkpoints.compilers import share_compiler
from support.servers.server_process import snapcap

from snapcap.models.processing import chat
from snapcap.service.telemetry import logs

_KEPT = "TESTS_CACHE"  # the folder that stays from run to run
_WITHOUT_SLOTS = ("encoder_before", "encoder_block", "decoder_before", "decoder_block", "decoder_after")

pytest_plugins = [
    "support.schedule",
    "support.servers.browser",
    "support.checkpoints.distribution",
    "support.servers.redis_server",
    "support.servers.s3_servers",
    "support.servers.small_disk",
]


def pytest_configure(config: pytest.Config) -> None:
    """Have all workers share one compiler and one folder of artifacts, which stay for the next run; byte code does
    too."""
    # Whatever the environment says: otherwise every worker would rewrite the assertions of 400 files in every run.
    sys.dont_write_bytecode = False
    if "PYTEST_XDIST_WORKER" in os.environ:  # which has both by its environment
        return
    if _KEPT not in os.environ:
        cache: pytest.Cache | None = getattr(config, "cache", None)
        if cache is None:  # pytest runs without its cache
            folder = tempfile.TemporaryDirectory(prefix="snapcap-tests-")
            config.add_cleanup(folder.cleanup)
            os.environ[_KEPT] = folder.name
        else:
            os.environ[_KEPT] = str(cache.mkdir("snapcap"))
    share_compiler(Path(os.environ[_KEPT]) / "compiler")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Objects that are made meanwhile live on: to search them for garbage takes two fifths of the collection.

    Hypothesis has its profile for CI before it is used: the same examples each time, and no time limit of an
    example, which a busy machine exceeds."""
    with suppress(ImportError):  # tests/gpu does without it
        from hypothesis import settings

        settings.load_profile("ci")
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def templates_rendered_once() -> Iterator[None]:
    """Has each chat template rendered once for the same messages: a process of its own does it, each time that a
    test reads the configuration of a model that chats. Tests of rendering take ``chat._rendered.__wrapped__``."""
    render, texts = chat._rendered, dict[str, list[str]]()

    @wraps(render)
    def rendered(*arguments: Any) -> list[str]:
        key = json.dumps(arguments)
        if key not in texts:
            texts[key] = render(*arguments)
        return texts[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "_rendered", rendered)
        yield


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    """Undoes a test's `logs.configure`, whose handler would write lines of later tests to a closed stream."""
    saved = [
        (logger, logger.handlers, logger.level, logger.propagate)
        for logger in map(logging.getLogger, logs._LOGGERS)
    ]
    yield
    for logger, handlers, level, propagate in saved:
        for handler in logger.handlers:
            if handler not in handlers and isinstance(handler, logs.LineHandler):
                handler.stream = io.StringIO()  # for lines that still wait
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The captioner that ships with the repository."""
    return Path(__file__).parent.parent / "models" / "demo"


@pytest.fixture(scope="session")
def samples(demo_folder: Path) -> dict[Path, str]:
    """The demo model's images and the right caption of each."""
    captions = json.loads((demo_folder / "samples" / "captions.json").read_text())
    return {demo_folder / "samples" / name: caption for name, caption in captions.items()}


@pytest.fixture(scope="session")
def built_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder whose store has the demo model's artifacts for buckets 1 and 4; built once for a key, one to
    two minutes, by one worker for all. Copy it to change it."""
    return _built(tmp_path_factory, "built", "--buckets", "1,4")


@pytest.fixture(scope="session")
def int8_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a folder for bucket 4, with weights of int8."""
    return _built(tmp_path_factory, "int8", "--buckets", "4", "--dtype", "int8")


@pytest.fixture(scope="session")
def stepped_cache(tmp_path_factory: pytest.TempPathFactory, built_cache: Path) -> Path:
    """Such a folder for a further bucket of 8, of decode steps alone. Regions that do not know the number of slots
    are those of ``built_cache``."""
    return _built(tmp_path_factory, "stepped", "--buckets", "1,4", "--step-buckets", "8", beside=built_cache)


def _built(tmp_path_factory: pytest.TempPathFactory, name: str, *buckets: str, beside: Path | None = None) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = base if "PYTEST_XDIST_WORKER" not in os.environ else base.parent
    built = shared / name
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            key = key_of(tmp_path_factory.mktemp("empty"), *buckets)
            cache = Path(os.environ[_KEPT]) / key
            if beside and not cache.exists():
                take_packages(beside, _WITHOUT_SLOTS, (1, 4), cache / "store" / "builds" / key)
                (cache / "store").chmod(0o700)
            # Other workers wait for it, so it may have their CPUs.
            options = ("--cache-dir", str(cache), *buckets, "--build-workers", "2", "--prepared-weights")
            run = snapcap("build", *options, timeout=900)
            assert run.returncode == 0, run.stderr
            built.write_text(str(cache))
    return Path(built.read_text())


@pytest.fixture(scope="session")
def compiled_options(built_cache: Path) -> tuple[str, ...]:
    """Options of a start that takes a third of a second: it runs the built packages, and never imports torch."""
    return ("--cache-dir", str(built_cache), "--buckets", "1,4", "--backend", "aot", "--prepared-weights")


@pytest.fixture(scope="session")
def make_captioner() -> Callable[..., Any]:
    """``make_captioner(encoder={...}, decoder={...}, seed=0)`` -> a random transformers VisionEncoderDecoderModel.

    Weights are larger than transformers' initial ones, so that attention is not flat and tokens vary.
    """
    import torch
    import transformers

    def make(encoder: dict[str, Any], decoder: dict[str, Any], seed: int = 0, **generation: Any) -> Any:
        vision = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
        text = {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3}
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(**{**vision, "image_size": 96, "patch_size": 16, **encoder}),
            transformers.GPT2Config(
                **{**text, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "add_cross_attention": True}
                | decoder
            ),
        )
        torch.manual_seed(seed)
        model = transformers.VisionEncoderDecoderModel(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "wpe" in name:
                    parameter.mul_(40)  # a tied head would repeat the token it has just read for ever
                elif parameter.dim() > 1 and "embed" not in name and "wte" not in name:
                    parameter.mul_(6)
                elif "ln_" in name or "layernorm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        settings = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_length": 20}
        for field, value in {**settings, **generation}.items():
            setattr(model.generation_config, field, value)
        return model

    return make
