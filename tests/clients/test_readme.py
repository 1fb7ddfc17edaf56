"""The clients' examples of the README, run as they stand there but for the address and the name of the model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers.server_process import clean_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_is_one_for_each_api() -> None:
    for client in ("huggingface_hub", "openai", "tritonclient"):
        assert sum(client in example for example in EXAMPLES) == 1


@pytest.mark.parametrize("example", [each for each in EXAMPLES if "localhost:8000" in each])
def test_an_example_prints_the_caption(example: str, url: str, model: str, samples: dict[Path, str]) -> None:
    program = example.replace("localhost:8000", url.removeprefix("http://")).replace('"demo"', f'"{model}"')
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (image,) = set(re.findall(r"models/demo/samples/[\w-]+\.png", example))
    assert done.stdout == f"{samples[ROOT / image]}\n"
