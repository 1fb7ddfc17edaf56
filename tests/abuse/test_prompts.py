"""Prompts at which a checkpoint's tokenizer panics, makes gigabytes or takes for ever."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.attacks.abuse import Abused
from support.attacks.hostile_tokenizer import GROWS, MANY, PANIC, SLOW, write_hostile_tokenizer

# More than the tokenizer's process may take: each makes a copy of the text while it grows.
PROMPTS = {"panic": PANIC, "grows": GROWS, "slow": SLOW, "many": MANY}
MEMORY = 512 << 20


@pytest.fixture(scope="module")
def misled(
    demo_folder: Path,
    samples: dict[Path, str],
    compiled_options: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Abused]:
    """The demo model with a tokenizer that is an attack."""
    folder = write_hostile_tokenizer(demo_folder, tmp_path_factory.mktemp("model"))
    model = ("--model", str(folder), "--model-name", "demo")
    with Abused(samples, *compiled_options, *model, "--decode-processes", "2") as server:
        yield server


def test_prompts_that_a_tokenizer_fails_at(misled: Abused) -> None:
    """Each is refused, again and again, while pictures beside them get their captions."""

    def ask(prompt: str) -> tuple[int, Any]:
        path = next(iter(misled.samples))
        status, reply, _ = misled.server.call(f"/v1/caption?prompt={quote(prompt)}", path.read_bytes())
        return status, reply

    def caption(path: Path) -> object:
        return misled.server.caption(path)["caption"]

    def attack() -> None:
        with ThreadPoolExecutor(8) as pool:
            asked = {name: [pool.submit(ask, prompt) for _ in range(3)] for name, prompt in PROMPTS.items()}
            captions = {path: pool.submit(caption, path) for path in misled.samples}
            for name, each in asked.items():
                for reply in each:
                    status, problem = reply.result()
                    assert status in (422, 504) if name == "slow" else status == 422, (name, problem)
            assert {path: each.result() for path, each in captions.items()} == dict(misled.samples)
        assert ask("a red")[0] == 200

    damage = misled.withstands(attack)
    assert damage.window.peak < damage.before + MEMORY
