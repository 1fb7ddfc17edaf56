"""Runs `snapcap explain`: shows whether a start would find artifacts, and which factors of the key differ."""

import sys

from rich.console import Console
from rich.table import Table

from snapcap.service.config.settings import Settings
from snapcap.service.readiness import ExitStatus
from snapcap.service.telemetry import logs
from snapcap.warmup.artifacts.fetch import NotFetchedError
from snapcap.warmup.artifacts.key import ABSENT, describe_model
from snapcap.warmup.artifacts.worker import find_artifacts
from snapcap.warmup.checkpoints.source import is_publishable
from snapcap.warmup.errors import one_line
from snapcap.warmup.plan.checkpoint import read_checkpoint
from snapcap.warmup.plan.memory import plan_of_server
from snapcap.warmup.weights.published import ModelFetcher


def explain(settings: Settings, show_all: bool) -> int:
    """Prints the key of a start here and the result of the lookup. Returns exit status 0 on a hit, else an
    `ExitStatus`.

    ``show_all`` prints every factor of the key, and not only factors that differ."""
    logs.configure(settings.log.format, settings.log.level)
    try:
        checkpoint = read_checkpoint(settings)
        factors = plan_of_server(checkpoint, settings).factors(checkpoint.config, settings.kind)
        artifacts = find_artifacts(settings, factors)
    except Exception as error:
        print(f"snapcap: {one_line(error)}", file=sys.stderr)
        return ExitStatus.of(error)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    fetched = artifacts.fetched
    differences = {difference.name: difference for difference in fetched.differences}
    console.print(f"model  {describe_model(artifacts.factors)}")
    if differences:
        nearest = {**artifacts.factors, **{name: difference.theirs for name, difference in differences.items()}}
        console.print(f"near   {describe_model(nearest)}")
    console.print(f"key    {artifacts.key}")
    console.print(f"result {fetched.result}: {fetched.reason}")
    if is_publishable(settings.model.source):  # another machine does not find a folder by its name
        console.print(f"weights {_published(settings)}")
    if shown := sorted({*artifacts.factors, *differences} if show_all else differences):
        table = Table("factor", "here", *(["nearest artifacts"] if differences else []), box=None, pad_edge=False)
        for name in shown:
            row = [name, str(artifacts.factors.get(name, ABSENT))]
            if differences:
                row.append(f"← {differences[name].theirs}" if name in differences else "")
            table.add_row(*row, style="bold" if show_all and name in differences else "")
        console.print()
        console.print(table)
    return 0 if artifacts.hit else 1


def _published(settings: Settings) -> str:
    """Returns a line about the published weights, as a machine without the checkpoint would find them."""
    fetcher = ModelFetcher(settings)
    try:
        found = fetcher.describe(download=False).found
    except NotFetchedError as error:
        return f"{error.fetched.result}: {error}"
    finally:
        fetcher.close()
    manifest, size = found.manifest, f"{found.weights.size / (1 << 20):.1f} MiB"
    return f"hit: {size} and {len(manifest.entries)} small files of {manifest.created}"
