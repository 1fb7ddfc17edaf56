"""Serves snapcap as an application of Ray Serve: the same routes over one engine in each replica.

    serve run snapcap.service.server.ray.replica:application model=demo store=/shared/snapcap

Ray starts the replicas, sends them requests, counts the requests in flight and replaces replicas that fail. Ray
also does everything that `snapcap serve` does around the application: listeners, signals, draining.
"""

import argparse
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve import Application
from ray.serve.metrics import Gauge
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapcap.service.api.app import Exposure, create_app
from snapcap.service.config.reader import SettingsError, read_settings
from snapcap.service.config.settings import (
    HttpLimits,
    HttpSettings,
    ImageProcessSettings,
    ResidencySettings,
    Settings,
)
from snapcap.service.http.access import read_api_keys
from snapcap.service.http.middleware import REQUEST_ID_HEADER
from snapcap.service.readiness import State
from snapcap.service.server.http_process import assemble, body_limits
from snapcap.service.server.in_process import start
from snapcap.service.telemetry import logs
from snapcap.service.telemetry.tracing import open_tracing
from snapcap.warmup.machine.own_imports import import_only_what_is_installed
from snapcap.warmup.progress.timeline import Timeline

_SECONDS = 5.0


class RayMetrics:
    """Copies every sample to a gauge in a thread. Ray puts `ray_` before its name. Queries compute rates and
    quantiles of such a gauge as of the copied counter or histogram."""

    def __init__(self, registry: CollectorRegistry, seconds: float = _SECONDS) -> None:
        self._registry = registry
        self._seconds = seconds
        self._gauges: dict[str, Gauge] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def copy(self) -> None:
        """Copies every sample's present value."""
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(
                        sample.name, description=family.documentation, tag_keys=tuple(sample.labels)
                    )
                self._gauges[sample.name].set(sample.value, tags=dict(sample.labels))

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.copy()


_POLL_SECONDS = 0.02
# Seconds after which a start counts as hung, unless --start-timeout says otherwise. The startup probe on Kubernetes
# has the same limit; its comment has the calculation.
_START_SECONDS = 300
# Options of listeners, draining and connections, which are Ray's own.
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
    """Returns the application for Ray Serve. `serve run` and a configuration's `import_path` call it with their
    `args`.

    Args:
        options: the options of `snapcap serve`, named as their variables without the prefix, in upper or lower
        case:
            ``{"model": "demo", "queue_size": 64}``. An option that is not given here is taken from the SNAPCAP_
            variables of the replica's environment.

    Raises:
        SettingsError: an option is unknown or has a bad value.
    """
    given = {f"SNAPCAP_{name.upper()}": str(value) for name, value in options.items()}
    _settings(given)  # checked here, where the person who deploys sees the error
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="snapcap",
        # Two batches of a CPU's largest bucket: the first runs, the second waits in the replica's queue.
        max_ongoing_requests=16,
        # Longer than SNAPCAP_REQUEST_TIMEOUT, which is 30 s, so that every accepted request ends.
        graceful_shutdown_timeout_s=35,
        health_check_period_s=5,
        health_check_timeout_s=30,
    )
    return deployment.bind(given)


class Replica:
    """Runs one engine in a Ray actor. Ray sees the replica as ready when the state is READY, and as unhealthy when
    the state is FAILED."""

    def __init__(self, variables: dict[str, str]) -> None:
        """Starts the model as `snapcap serve` does. Returns when captions are served.

        Raises:
            RuntimeError: the start failed or hangs. Ray reports the message and starts the replica again.
            SettingsError: a variable in the environment of this machine is wrong.
        """
        import_only_what_is_installed()  # Ray's workers run where the application was deployed from
        self._exits = ExitStack()
        own = {name: value for name, value in os.environ.items() if name.startswith("SNAPCAP_")}
        self._settings = settings = _settings(_share() | own | variables)
        logs.configure(settings.log.format, settings.log.level)
        # The timeline begins now and not at exec, because Ray keeps processes in reserve.
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
        # Clients reach Ray's proxy, under any name.
        exposure = Exposure.of(http if http.hosts else replace(http, hosts=("*",)), keys)
        app = create_app(self._services, limits, exposure)
        tracing = open_tracing(os.environ)
        if tracing is not None:
            app.trace(tracing)
            self._exits.callback(tracing.close)
        return _RaysRequestId(app)

    def check_health(self) -> None:
        """Raises if the replica has failed. Ray calls it every few seconds, and replaces a replica that raises."""
        readiness = self._services.readiness
        if readiness.state is State.FAILED:
            raise RuntimeError(readiness.error)

    def __del__(self) -> None:
        """Ends the replica's background work. Ray calls it once the last request is answered."""
        self._exits.close()


class _RaysRequestId:
    """ASGI middleware that removes the request id from the reply's headers, because Ray adds a header with its
    own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID_HEADER]
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
    if settings.residency != ResidencySettings():
        raise SettingsError("a replica has one model that stays; Ray starts and ends replicas by itself")
    if settings.image_processes != ImageProcessSettings():
        raise SettingsError("decode_processes has no meaning on Ray, where threads of the replica decode")
    return settings


def _share() -> dict[str, str]:
    """Returns the options of threads for the CPUs that Ray gave this replica. By default the server would use all
    CPUs of the machine."""
    cpus = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    share = str(max(cpus - 1, 1))
    return {"SNAPCAP_THREADS": share, "SNAPCAP_DECODE_THREADS": str(max(cpus, 1)), "SNAPCAP_BUILD_WORKERS": share}
