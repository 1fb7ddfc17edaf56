"""Starts one server with the demo model, under a name with a slash, for the clients of all APIs."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.servers.server_process import ServerProcess, clean_environment

MODEL = "org/captioner"


@pytest.fixture(scope="session")
def server(compiled_options: tuple[str, ...]) -> Iterator[ServerProcess]:
    with ServerProcess(*compiled_options, "--model-name", MODEL) as process:
        yield process.wait_ready()


@pytest.fixture(scope="session")
def url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the model."""
    return MODEL


@pytest.fixture(scope="session")
def sample(samples: dict[Path, str]) -> tuple[Path, str]:
    """An image and its caption."""
    return next(iter(samples.items()))


@pytest.fixture
def schemathesis(tmp_path: Path) -> Callable[..., None]:
    """``schemathesis(url, *options)`` holds a server to its own OpenAPI document; fails with what it found."""
    tests = Path(__file__).parents[1]

    def run(url: str, *options: str) -> None:
        config = str(tests / "support" / "attacks" / "schemathesis.toml")
        command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", config, "run"]
        # The hooks check which good requests are accepted: positive_data_acceptance cannot know all of it.
        checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--seed", "1"]
        done = subprocess.run(
            [*command, f"{url}/openapi.json", *checks, *options],
            env=clean_environment(PYTHONPATH=str(tests), SCHEMATHESIS_HOOKS="support.attacks.schemathesis_hooks"),
            cwd=tmp_path,  # it leaves its caches there
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        # Images in base64 fill the report.
        report = re.sub(r"[A-Za-z0-9+/=]{200,}", "…", done.stdout)
        assert done.returncode == 0, report[-20_000:]
        assert "No issues found" in done.stdout

    return run
