"""The jit backend compiles the regions of families with stages of their own, and says what transformers does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers.server_process import clean_environment

TESTS = Path(__file__).parents[2]


@pytest.mark.timeout(600)  # compiling
@pytest.mark.parametrize("family", ["git", "smolvlm", "llava", "florence2"])
def test_tokens_equal_transformers_and_nothing_compiles_after_the_warm_up(family: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "support.programs.jit_family", family, str(tmp_path)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    for name in ("alone", "prompt"):
        tokens, expected = result[name]
        assert tokens == expected, name
        assert len({*tokens[0], *tokens[1]}) > 2, "the model must not repeat one token"
    assert result["graphs"] == result["graphs_after"] > 4
