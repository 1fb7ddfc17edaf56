"""The jit backend traces the regions of every family once, and says what transformers does.

Dynamo traces the regions and guards their graphs. Inductor compiles the same regions for packages in tests/e2e, and
the demo model's for a server on jit in `tests/e2e/test_jit_start.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers.server_process import clean_environment

TESTS = Path(__file__).parents[2]
FAMILIES = ("blip", "git", "smolvlm", "llava", "florence2", "qwen3_vl")


@pytest.mark.timeout(600)  # compiling
def test_tokens_equal_transformers_and_nothing_is_traced_after_the_warm_up(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "support.programs.jit_family", str(tmp_path), *FAMILIES],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(run.stdout.splitlines()[-1])
    assert tuple(results) == FAMILIES
    for family, result in results.items():
        for name in ("alone", "prompt"):
            tokens, expected = result[name]
            assert tokens == expected, (family, name)
            assert len({*tokens[0], *tokens[1]}) > 1, f"{family}: the model must not repeat one token"
        assert result["graphs"] == result["graphs_after"] > 4, family
