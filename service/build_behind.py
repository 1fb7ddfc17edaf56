"""Whether a server that is ready builds what it started without."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.engine import Engine
    from warmup.options import StartOptions
    from warmup.startup import Loaded
    from warmup.status import StartupStatus


def start_build(
    options: "StartOptions", loaded: "Loaded", status: "StartupStatus", engine: "Engine"
) -> Callable[[], object]:
    """Start the build, if there is something to build, and return what ends it."""
    if loaded.compiled or options.backend not in ("auto", "aot") or options.build == "off":
        return lambda: None
    from warmup.background import BackgroundBuild  # noqa: PLC0415  only a start without artifacts

    build = BackgroundBuild(loaded, options, status, engine.call)
    build.start()
    return build.stop
