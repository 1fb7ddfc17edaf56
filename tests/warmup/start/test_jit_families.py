"""The jit backend compiles the regions of families with stages of their own, and says what transformers does.

Dynamo traces every family's regions and guards their graphs. Inductor makes code of one family's graphs: what it
makes of the others' is compiled for their packages, in tests/e2e, and BLIP's server on jit is there too.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers.server_process import clean_environment

TESTS = Path(__file__).parents[2]


@pytest.mark.timeout(600)  # compiling
@pytest.mark.parametrize(
    ("compiler", "families"), [("inductor", ["smolvlm"]), ("eager", ["git", "llava", "florence2", "qwen3_vl"])]
)
def test_tokens_equal_transformers_and_nothing_compiles_after_the_warm_up(
    compiler: str, families: list[str], tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "support.programs.jit_family", str(tmp_path), compiler, *families],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(run.stdout.splitlines()[-1])
    assert list(results) == families
    for family, result in results.items():
        for name in ("alone", "prompt"):
            tokens, expected = result[name]
            assert tokens == expected, (family, name)
            assert len({*tokens[0], *tokens[1]}) > 2, f"{family}: the model must not repeat one token"
        assert result["graphs"] == result["graphs_after"] > 4, family
