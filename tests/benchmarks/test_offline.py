"""The bench of a caption without a server: what is run, what counts as a result, and what is printed."""

import sys
from pathlib import Path

import pytest

from snapcap.benchmarks.harness.measurements import Samples
from snapcap.benchmarks.startup import offline
from snapcap.benchmarks.startup.offline import CASES, COMMAND, LIBRARY, TORCH, commands, measure, report, run_once


def taken(*seconds: float) -> Samples:
    found = Samples()
    for each in seconds:
        found.add({"seconds": each})
    return found


def test_all_cases_are_of_one_model_device_and_store(tmp_path: Path) -> None:
    made = commands(tmp_path / "model", "cpu", "1,4", tmp_path / "cache", tmp_path / "one.jpg")
    assert tuple(made) == CASES
    assert made[TORCH][1:] == ("-c", "import torch")
    for name in (COMMAND, LIBRARY):
        assert {str(tmp_path / "model"), str(tmp_path / "cache"), "cpu", "1,4"} <= set(made[name])
        assert made[name][-1] == str(tmp_path / "one.jpg")


def test_the_library_captions_in_a_process_of_its_own(
    tmp_path: Path, demo_folder: Path, samples: dict[Path, str]
) -> None:
    """In a process of its own, on whatever backend there is."""
    image, caption = next(iter(samples.items()))
    command = commands(demo_folder, "cpu", "1", tmp_path, image)[LIBRARY]
    assert run_once(command, caption)["seconds"] > 0


@pytest.mark.parametrize(
    ("program", "said"), [("raise SystemExit(3)", "ended with 3"), ("print('a cat')", "a wrong caption: 'a cat")]
)
def test_what_fails_or_is_wrong_is_no_result(program: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        run_once((sys.executable, "-c", program), "a dog")


def test_cases_take_turns_after_one_that_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snapcap.benchmarks.harness.workload import open_workload

    order: list[str] = []

    def run(command: tuple[str, ...], caption: str | None) -> dict[str, float]:
        name = TORCH if "import torch" in command else COMMAND if "caption" in command else LIBRARY
        assert (caption is None) is (name == TORCH)
        order.append(name)
        return {"seconds": 1.0}

    monkeypatch.setattr(offline, "run_once", run)
    results = measure(open_workload("demo", tmp_path), "cpu", "1", tmp_path, 2)
    assert order == [*CASES, *CASES, *CASES]
    assert {len(each.values["seconds"]) for each in results.values()} == {2}


def test_the_ratio_is_that_of_the_medians() -> None:
    (table,) = report({TORCH: taken(1.0, 2.0, 9.0), COMMAND: taken(0.5, 0.9, 0.8)}).tables
    rows = {row[0]: row for row in table["rows"]}
    assert rows[COMMAND][1:] == ["3", "0.80", "0.50", "0.90", "0.40 ×", "≤ 0.5 ×"]
    assert rows[TORCH][-2:] == ["1.00 ×", ""]
