"""The Dockerfile without building it: `deploy/container/build-and-try.sh` builds and tries it, in minutes."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.checkpoints.dockerfile import Dockerfile

from snapcap.service.cli import main as commands
from snapcap.service.cli.main import main
from snapcap.service.config.reader import read_settings

ROOT = Path(__file__).parents[2]
TARGETS = ("server", "compiled", "builder")
SCRIPT = ROOT / "deploy" / "container" / "build-and-try.sh"
MOST_WORDS = 60  # of a line of the changelog: the history of each change is in git


def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("HADOLINT IS NOT INSTALLED: make setup")
    run = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


def test_the_server_is_the_default_target(dockerfile: Dockerfile) -> None:
    assert set(TARGETS) < set(dockerfile.stages)
    assert [*dockerfile.stages][-1] == "server"


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_a_command_of_snapcap_without_a_shell_and_without_root(dockerfile: Dockerfile, target: str) -> None:
    (entrypoint,) = dockerfile.inherited(target, "ENTRYPOINT")
    (command,) = dockerfile.inherited(target, "CMD")
    scripts = project()["scripts"]
    assert isinstance(scripts, dict)
    (program,) = json.loads(entrypoint)
    assert program in scripts
    with pytest.raises(SystemExit) as ended:
        main([*json.loads(command), "--help"])
    assert ended.value.code == 0
    user = dockerfile.inherited(target, "USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "by number, or Kubernetes cannot tell that it is not root"
    assert dockerfile.inherited(target, "HEALTHCHECK") == []


@pytest.mark.parametrize("target", TARGETS)
def test_its_settings_are_settings(dockerfile: Dockerfile, target: str) -> None:
    settings = read_settings(argparse.Namespace(), dockerfile.environment(target))
    assert settings.model.cache_dir == Path("/var/cache/snapcap")
    assert settings.store.build == ("auto" if target == "builder" else "off")
    (port,) = dockerfile.inherited(target, "EXPOSE")
    assert int(port) == settings.http.port


def test_only_the_builder_has_a_compiler(dockerfile: Dockerfile) -> None:
    assert any("g++" in run for run in dockerfile.inherited("builder", "RUN"))
    assert not any("apt-get" in run for run in dockerfile.inherited("server", "RUN"))
    (copied,) = dockerfile.inherited("server", "COPY")
    source = copied.removeprefix("--from=").split()[0]
    assert any("torch/include" in run for run in dockerfile.stages[source].values("RUN"))
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    installed = " ".join(run for stage in dockerfile.stages.values() for run in stage.values("RUN"))
    assert [extra for extra in extras if f"[{extra}" in installed] == []


def test_every_package_is_copied_and_nothing_else_is_sent(dockerfile: Dockerfile) -> None:
    stages = [dockerfile.stages[name] for name in ("packages", "compiled-packages")]
    copied = {name for stage in stages for copy in stage.values("COPY") for name in copy.split()[:-1]}
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {package.rstrip("*") for package in find["include"]} <= copied
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert ignore[ignore.index("*") :].index("*") == 0
    assert all((ROOT / name).exists() for name in copied)


def test_labels_and_base_image(dockerfile: Dockerfile) -> None:
    labels = dict(
        re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', dockerfile.inherited("server", "LABEL")[0])
    )
    expected = {"title": "snapcap", "version": project()["version"], "licenses": project()["license"]}
    assert {name: labels[name] for name in expected} == expected
    arguments = dict(argument.split("=", 1) for argument in dockerfile.arguments)
    bases = {stage.base for stage in dockerfile.stages.values()} - set(dockerfile.stages)
    assert bases == {f"${{{name}}}" for name in arguments}
    assert not any("/" in image for image in arguments.values()), "from whose registry is the builder's choice"


def test_a_version_has_a_section_of_short_lines_and_its_images_have_its_name() -> None:
    version = project()["version"]
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert any(section.startswith(f"{version} ") for section in sections)
    assert f"| {version} and the main branch |" in (ROOT / "SECURITY.md").read_text()
    bullets = re.findall(r"^- (.*)$", "\n".join(sections), flags=re.MULTILINE)
    assert [bullet for bullet in bullets if len(bullet.split()) > MOST_WORDS] == []
    tags = [
        line.split()[-1]
        for path in (ROOT / "deploy" / "kubernetes").rglob("kustomization.yaml")
        for line in path.read_text().splitlines()
        if "newTag:" in line
    ]
    chart = (ROOT / "deploy" / "helm" / "Chart.yaml").read_text()
    tags += re.findall(r"^(?:version|appVersion): (\S+)$", chart, re.MULTILINE)
    assert {tag.removesuffix("-cuda") for tag in tags} == {version}


def test_the_script_is_shell_and_names_settings_and_targets(dockerfile: Dockerfile) -> None:
    assert os.access(SCRIPT, os.X_OK)
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    text = SCRIPT.read_text()
    variables = dict(re.findall(r'--env "?(SNAPCAP_\w+)=([\w,]+)', text.replace("$port", "18080")))
    assert variables
    read_settings(argparse.Namespace(), variables)
    built, served = (set(targets.split()) for targets in re.findall(r"^for target in (.*); do", text, re.MULTILINE))
    assert built == served | {"builder"} == set(TARGETS)
    assert set(re.findall(r"snapcap-try:(\w+)", text)) < set(TARGETS)
    assert {"/tmp", "/var/cache/snapcap"} <= set(re.findall(r"[:\s](/[a-z/]+)(?=[:\"])", text))


def test_the_commands_of_the_first_page_are_commands_of_the_image_that_it_builds(dockerfile: Dockerfile) -> None:
    text = (ROOT / "README.md").read_text()
    (build,) = re.findall(r"^docker build (.*?) *#.*--build-arg (\w+)=(\w+)$", text, re.MULTILINE)
    assert re.findall(r"--target (\S+) -t (\S+)", build[0]) == [("builder", "snapcap")]
    assert build[1] in {argument.split("=")[0] for argument in dockerfile.stages["packages"].values("ARG")}
    runs = [shlex.split(run) for run in re.findall(r"^docker run (.*)$", text, re.MULTILINE)]
    assert [run[run.index("snapcap") + 1] for run in runs] == ["caption", "serve"]
    cache = dockerfile.environment("builder")["SNAPCAP_CACHE_DIR"]
    for run in runs:
        name, *arguments = run[run.index("snapcap") + 1 :]
        assert run[run.index("-v") + 1] == f"snapcap:{cache}"
        parser = commands._command_parser(name, commands._COMMANDS[name], None)
        assert parser.parse_known_args(arguments)[1] == []


def test_the_commands_of_the_readme_name_what_there_is(dockerfile: Dockerfile) -> None:
    text = (ROOT / "deploy" / "container" / "README.md").read_text()
    builds = re.findall(r"^docker build (.*?)(?:#.*)?$", text, re.MULTILINE)
    assert [re.findall(r"--target (\S+)", build) for build in builds] == [[], ["builder"], ["compiled"]]
    images = {re.findall(r"-t (\S+)", build)[0] for build in builds}
    runs = re.findall(r"^docker run (.*)$", text, re.MULTILINE)
    assert all(run.split()[-1] in images or run.split()[-2] in images for run in runs)
    cache = dockerfile.environment("server")["SNAPCAP_CACHE_DIR"]
    assert all(f":{cache} " in run and "--tmpfs /tmp:exec " in run and "--read-only " in run for run in runs)
    arguments = {argument.split("=")[0] for stage in dockerfile.stages.values() for argument in stage.values("ARG")}
    known = arguments | {argument.split("=")[0] for argument in dockerfile.arguments}
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)) <= known
