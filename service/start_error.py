"""What a start that failed says of itself."""

import sys

# Errors that name their remedy themselves, by module: importing these is not for every process.
_KNOWN = {
    "snapcap.models.weights.files": "WeightsError",
    "snapcap.models.fields": "ConfigError",
    "snapcap.service.engine.device_failures": "DeviceFailedError",
    "snapcap.service.server.engine_process.monitor": "EngineEndedError",
    "snapcap.service.images.pool": "DecodersEndedError",
    "snapcap.service.watch.watchdog": "StalledError",
    "snapcap.warmup.build.builder": "BuildError",
    "snapcap.warmup.checkpoints.patterns": "CheckpointError",
    "snapcap.warmup.plan.plan": "StartError",
    "snapcap.warmup.store.store": "StoreError",
}


def explain(error: Exception) -> str:
    """One line for the log, /readyz and /startup."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}" if unexpected(error) else text


def unexpected(error: Exception) -> Exception | None:
    """The error when it is not one that names its remedy itself: then the log must have its trace."""
    # One whose module has not been imported cannot have been raised.
    known = tuple(getattr(sys.modules.get(module), name, ()) for module, name in _KNOWN.items())
    return None if isinstance(error, known) else error
