"""Serves snapcap as an application of Ray Serve: the same routes over one engine in each replica.

    serve run snapcap.service.server.ray.replica:application model=demo store=/shared/snapcap

Ray starts the replicas, sends requests to them, counts those that are on their way and replaces the replicas that
fail; what `snapcap serve` does around the application (listeners, signals, draining) is Ray's here.
"""

import argparse
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapcap.service.api.app import Exposure, create_app
from snapcap.service.api.middleware.api_keys import read_api_keys
from snapcap.service.api.middleware.request_id import HEADER
from snapcap.service.config.http_settings import HttpLimits, HttpSettings
from snapcap.service.config.image_settings import ImageProcessSettings
from snapcap.service.config.reader import SettingsError, read_settings
from snapcap.service.config.settings import Settings
from snapcap.service.readiness import State
from snapcap.service.server.http_limits import body_limits
from snapcap.service.server.http_process import assemble
from snapcap.service.server.in_process import start
from snapcap.service.server.ray.metrics import RayMetrics
from snapcap.service.telemetry import logs
from snapcap.service.telemetry.tracing import open_tracing
from snapcap.warmup.machine.own_imports import import_only_what_is_installed
from snapcap.warmup.progress.timeline import Timeline

_POLL_SECONDS = 0.02
# As the startup probe on Kubernetes, whose comment has the sum: a start that takes longer hangs.
_START_SECONDS = 300
# Ray's listeners, Ray's connections and Ray's draining.
_RAYS_OWN = ("host", "port", "metrics_port", "drain_delay", "grace_period")
_RAYS_LIMITS = (
    "max_header_bytes",
    "max_headers",
    "header_timeout",
    "keep_alive_timeout",
    "send_timeout",
    "max_connections",
)


def application(options: dict[str, Any]) -> Application:
    """What `serve run` and a configuration's `import_path` call, with their `args`.

    Args:
        options: those of `snapcap serve`, as in the environment but without the prefix and in any case:
            ``{"model": "demo", "queue_size": 64}``. The SNAPCAP_ variables of a replica's own environment count
            for what is not given here.

    Raises:
        SettingsError: an option is unknown or has a bad value.
    """
    given = {f"SNAPCAP_{name.upper()}": str(value) for name, value in options.items()}
    _settings(given)  # here, where whoever deploys sees the sentence
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="snapcap",
        # Two batches of a CPU's largest bucket: one runs, the other waits where it can join.
        max_ongoing_requests=16,
        # A caption in its last second is finished: SNAPCAP_REQUEST_TIMEOUT is 30.
        graceful_shutdown_timeout_s=35,
        health_check_period_s=5,
        health_check_timeout_s=30,
    )
    return deployment.bind(given)


class Replica:
    """One engine in one actor. Ready for Ray when it is READY, unhealthy for Ray when it is FAILED."""

    def __init__(self, variables: dict[str, str]) -> None:
        """Start as `snapcap serve` does, and return when captions are served.

        Raises:
            RuntimeError: the start failed, or hangs; Ray reports the sentence, and tries again.
            SettingsError: the environment of this machine has a variable that is wrong.
        """
        import_only_what_is_installed()  # Ray's workers run where the application was deployed from
        self._exits = ExitStack()
        own = {name: value for name, value in os.environ.items() if name.startswith("SNAPCAP_")}
        self._settings = settings = _settings(_share() | own | variables)
        logs.configure(settings.log.format, settings.log.level)
        # Since now, and not since exec: Ray keeps processes in reserve.
        self._services = services = assemble(settings, Timeline(time.monotonic()))
        self._exits.callback(services.captioner.close)
        self._exits.callback(start(settings, services, lambda: None))
        self._exits.callback(services.readiness.drain)
        self._wait_until_ready()
        metrics = RayMetrics(services.registry)
        self._exits.callback(metrics.stop)
        metrics.start()

    def _wait_until_ready(self) -> None:
        readiness = self._services.readiness
        limit = self._settings.watchdog.start_timeout or _START_SECONDS
        end = time.monotonic() + limit
        while readiness.state is State.STARTING:
            if time.monotonic() > end:
                raise RuntimeError(f"not ready after {limit:g} s, in phase {readiness.phase()}")
            time.sleep(_POLL_SECONDS)
        if not readiness.servable:
            raise RuntimeError(f"the start failed: {readiness.error}")

    def __serve_build_asgi_app__(self) -> ASGIApp:
        http = self._settings.http
        keys = None if http.api_key_file is None else read_api_keys(http.api_key_file)
        limits = body_limits(self._settings.limits, self._services.metrics)
        # Ray's proxy is what clients reach, by whatever name.
        exposure = Exposure.of(http if http.hosts else replace(http, hosts=("*",)), keys)
        app = create_app(self._services, limits, exposure)
        tracing = open_tracing(os.environ)
        if tracing is not None:
            app.trace(tracing)
            self._exits.callback(tracing.close)
        return _RaysRequestId(app)

    def check_health(self) -> None:
        """Asked by Ray every few seconds; who raises is replaced."""
        readiness = self._services.readiness
        if readiness.state is State.FAILED:
            raise RuntimeError(readiness.error)

    def __del__(self) -> None:
        """Called by Ray once the last request is answered: ends what is built in the background."""
        self._exits.close()


class _RaysRequestId:
    """ASGI middleware: Ray gives a request its id, and the reply a header with it; without ours there is one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[HEADER]
            await send(message)

        await self._app(scope, receive, send_without_id)


def _settings(variables: Mapping[str, str]) -> Settings:
    settings = read_settings(argparse.Namespace(), variables)
    for group, defaults, names in (
        (settings.http, HttpSettings(), _RAYS_OWN),
        (settings.limits, HttpLimits(), _RAYS_LIMITS),
    ):
        for name in names:
            if getattr(group, name) != getattr(defaults, name):
                raise SettingsError(f"{name} has no meaning on Ray, which listens, drains and is scraped by itself")
    if settings.image_processes != ImageProcessSettings():
        raise SettingsError("decode_processes has no meaning on Ray, where threads of the replica decode")
    return settings


def _share() -> dict[str, str]:
    """Threads for the CPUs that Ray gave this replica: the program would count those of the machine."""
    cpus = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    share = str(max(cpus - 1, 1))
    return {"SNAPCAP_THREADS": share, "SNAPCAP_DECODE_THREADS": str(max(cpus, 1)), "SNAPCAP_BUILD_WORKERS": share}
