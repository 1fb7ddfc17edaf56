"""Runs `snapcap build`: compiles, checks and publishes the artifacts of a model on this machine."""

import sys
import time
from dataclasses import replace

from rich.console import Console

from snapcap.service.cli.interrupt import Interrupted
from snapcap.service.config.settings import Settings
from snapcap.service.offline.progress import open_bar
from snapcap.service.readiness import ExitStatus
from snapcap.service.telemetry import logs
from snapcap.warmup.artifacts.fetch import Artifacts
from snapcap.warmup.artifacts.manifest import CPU_LIBRARY, IMAGE_LIBRARY
from snapcap.warmup.artifacts.remote import trust_of
from snapcap.warmup.artifacts.store import StoreError
from snapcap.warmup.artifacts.worker import find_artifacts, publish_in_worker
from snapcap.warmup.build.builder import Builder, Built, Event
from snapcap.warmup.build.environment import remote_cache_environment
from snapcap.warmup.build.release import check_publishing, publish_built, publish_weights
from snapcap.warmup.errors import BuildError, one_line
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint, read_checkpoint
from snapcap.warmup.plan.memory import free_for_another, plan_of_server
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.start.start import load
from snapcap.warmup.weights.prepare import prepare_in_worker, weights_worker

_WITHOUT = {CPU_LIBRARY: "starts will load torch's libraries", IMAGE_LIBRARY: "Pillow will resize images"}


def build(settings: Settings) -> int:
    """Builds and publishes the artifacts. Returns exit status 0 if the store then has them, else an `ExitStatus`.

    An Interrupted that is raised meanwhile says how many packages are kept."""
    logs.configure(settings.log.format, settings.log.level)
    try:
        return _build(settings)
    except Exception as error:
        print(f"snapcap: {one_line(error)}", file=sys.stderr)
        return ExitStatus.of(error)


def _build(options: StartOptions) -> int:
    check_publishing(options)
    checkpoint = read_checkpoint(options)
    _ = checkpoint.tokenizer  # raises if the tokenizer cannot be read, as no server could use the artifacts
    plan = plan_of_server(checkpoint, options)
    options = plan.pinned(options)
    artifacts = find_artifacts(options, plan.factors(checkpoint.config, options.kind))
    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())  # a log has each sentence on one line
    console.print(f"key {artifacts.key}", highlight=False)
    sizes = f"buckets {','.join(map(str, plan.buckets))}"
    if plan.step_buckets:
        sizes += f", step buckets {','.join(map(str, plan.step_buckets))}"
    console.print(f"{plan.device} {plan.dtype}, {sizes}", highlight=False)
    _prepare_weights(checkpoint, plan, options, console)
    status = _make(checkpoint, plan, artifacts, options, console)
    return max(status, _publish_weights(checkpoint, plan, options, console) if options.store.weights else 0)


def _make(checkpoint: Checkpoint, plan: Plan, artifacts: Artifacts, options: StartOptions, console: Console) -> int:
    """Builds the artifact set if the store does not have it, and publishes it. Returns the exit status."""
    if artifacts.hit and options.store.remote is None:
        console.print(f"nothing to do: {artifacts.fetched.reason}", markup=False)
        return 0
    started = time.monotonic()
    if options.compute.backend == "jit":
        return _build_jit(options, artifacts, console)
    if artifacts.hit:  # the set is on this machine, and perhaps not in the remote store
        built = Built(dict(artifacts.fetched.entries), dict(artifacts.input_specs), complete=True)
    else:
        built = _compile(checkpoint, plan, artifacts, options, console)
    for entry, reason in built.failures.items():
        console.print(f"failed {entry}: {reason}", style="red", highlight=False, markup=False)
    if not built.complete:
        count = len(built.failures) + len(built.input_specs)
        console.print(f"{len(built.failures)} of {count} packages failed: nothing published")
        return 1
    for entry, reason in built.no_libraries.items():
        console.print(f"{_WITHOUT[entry]}: {reason}", highlight=False, markup=False)
    try:
        publication = publish_built(built, artifacts.factors, options, to_remote=True, found=artifacts.fetched)
    except StoreError as error:
        raise BuildError(str(error)) from error
    for published in publication:
        console.print(f"{published.result}: {published.reason}", highlight=False, markup=False)
    if not artifacts.hit:
        console.print(f"{len(built.input_specs)} packages in {time.monotonic() - started:.0f} s")
    return 0 if publication[-1].done else 1


def _prepare_weights(checkpoint: Checkpoint, plan: Plan, options: StartOptions, console: Console) -> None:
    """Prepares the weights. If that fails, the build goes on: each start then converts the checkpoint itself."""
    if options.model.prepared_weights:
        with console.status("preparing weights"):
            prepared = prepare_in_worker(weights_worker(checkpoint.folder, plan, options), thorough=True)
        console.print(f"weights {prepared.result}: {prepared.reason}", highlight=False, markup=False)


def _publish_weights(checkpoint: Checkpoint, plan: Plan, options: StartOptions, console: Console) -> int:
    """Publishes the prepared weights to the store of the artifacts. Returns the exit status."""
    with console.status("publishing weights"):
        published = publish_weights(checkpoint, plan, options)
    console.print(f"weights {published.result}: {published.reason}", highlight=False, markup=False)
    return 0 if published.done else 1


def _build_jit(options: StartOptions, artifacts: Artifacts, console: Console) -> int:
    """Starts the model as a server on jit does, which publishes the compiled code. Returns the exit status."""
    with console.status("compiling every bucket"):
        strict = replace(options, compute=replace(options.compute, strict=True))
        loaded = load(strict, Timeline.since_exec(), StartupStatus())
    published = [] if loaded.publication is None else loaded.publication.result()
    if options.store.remote is not None and len(published) < 2:  # nothing was compiled, or nothing was signed
        published.append(publish_in_worker(artifacts.key, options, artifacts.fetched.unusable))
    for each in published:
        console.print(f"{each.result}: {each.reason}", highlight=False, markup=False)
    return 0 if published and all(each.done for each in published) else 1


def _compile(
    checkpoint: Checkpoint, plan: Plan, artifacts: Artifacts, options: StartOptions, console: Console
) -> Built:
    environment = remote_cache_environment(options.store.remote_cache, plan.device)
    if environment and plan.device_type == "cpu":
        console.print(
            "--remote-cache has no effect on this build: torch keeps only the autotuning of Triton kernels there"
        )
    with open_bar(console, rate=False) as progress:
        bar = progress.add_task("compiling", total=None)

        def show(event: Event) -> None:
            what = f"{event.task.region} × {event.task.size}"
            if event.kind == "compiled":
                progress.update(bar, description=f"checking {what}")
                return
            progress.update(bar, advance=1, description=what)
            if not console.is_terminal:
                line = f"{event.kind} {what} {event.seconds:.1f} s {event.error}".rstrip()
                console.print(line, highlight=False, markup=False)

        builder = Builder(
            checkpoint,
            plan,
            options.store_folder / "builds" / artifacts.key,
            workers=options.store.build_workers,
            on_event=show,
            environment=environment,
            timeout=options.store.build_timeout,
            device_memory=free_for_another(plan),
            only_own=not trust_of(options.store).owner_suffices,
        )
        progress.update(bar, total=len(builder.tasks))
        try:
            return builder.run()
        except Interrupted as interrupted:
            interrupted.kept = f"{len(builder.made()[0])} of {len(builder.tasks)} packages kept"
            raise
