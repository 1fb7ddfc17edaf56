"""The configurations for Ray Serve, without Ray: what they name exists in the program."""

import argparse
import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from snapcap.service.config.reader import read_settings
from snapcap.service.config.settings import Settings

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))


def deployment_of(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one application of a configuration, and its one deployment."""
    (application,) = yaml.safe_load(file.read_text())["applications"]
    (deployment,) = application["deployments"]
    return application, deployment


def settings_of(application: dict[str, Any]) -> Settings:
    given = {f"SNAPCAP_{name.upper()}": str(value) for name, value in application["args"].items()}
    return read_settings(argparse.Namespace(), given)


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [file.name for file in FILES] == ["cpu.yaml", "gpu.yaml"]
    options = {file.name: deployment_of(file)[1]["ray_actor_options"] for file in FILES}
    assert "num_gpus" not in options["cpu.yaml"]
    assert options["gpu.yaml"]["num_gpus"] == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_imported_is_there(file: Path) -> None:
    application, deployment = deployment_of(file)
    module, _, name = application["import_path"].partition(":")
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
    functions = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert f"name='{deployment['name']}'" in functions[name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_queues_and_scaling_follow_the_largest_batch(file: Path) -> None:
    application, deployment = deployment_of(file)
    settings = settings_of(application)
    rows = settings.compute.buckets[-1]
    assert deployment["max_ongoing_requests"] == 2 * rows
    assert deployment["autoscaling_config"]["target_ongoing_requests"] == rows * 3 // 4
    assert deployment["max_ongoing_requests"] <= settings.queue.size, "or replicas refuse what Ray lets through"
    assert settings.compute.device == ("cuda" if file.name == "gpu.yaml" else "auto")
    assert settings.store.trusted_keys
