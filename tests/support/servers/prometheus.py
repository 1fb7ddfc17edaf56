"""Runs a real Prometheus, which scrapes one server each second."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml


def require(*commands: str) -> None:
    """Skips the test, loudly, where one is missing."""
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        names = " AND NO ".join(missing).upper()
        pytest.skip(f"NO {names}: apt-get install prometheus TO TEST RULES AND DASHBOARDS")


def promtool(*arguments: str | Path, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Output and errors are in ``stdout``."""
    require("promtool")
    return subprocess.run(
        ["promtool", *map(str, arguments)],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


class Prometheus:
    """A context manager: scrapes ``127.0.0.1:port`` as job ``snapcap`` each second, and evaluates the rules."""

    def __init__(self, folder: Path, port: int, rules: Path) -> None:
        require("prometheus")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        target = {"job_name": "snapcap", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules.resolve())],
            "scrape_configs": [target],
        }
        self._folder = folder
        self._configuration = folder / "prometheus.yml"
        self._configuration.write_text(yaml.safe_dump(configuration))

    def __enter__(self) -> "Prometheus":
        options = {
            "config.file": self._configuration,
            "storage.tsdb.path": self._folder / "data",
            "web.listen-address": f"127.0.0.1:{self.port}",
        }
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                ["prometheus", *(f"--{name}={value}" for name, value in options.items())], stdout=log, stderr=log
            )
        self.wait_for("up == 1")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query; an expression that Prometheus does not take fails the test."""
        found: dict[str, Any] = self._get("query", query=expression)
        result: list[dict[str, Any]] = found["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Until the query has a sample."""
        end = time.monotonic() + seconds
        while True:
            try:
                if self.query(expression):
                    return
            except urllib.error.URLError:
                pass  # Prometheus does not listen yet, or has just begun and answers 503
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no {expression} in {seconds} s: {(self._folder / 'log').read_text()}")
            time.sleep(0.1)

    def _get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
