"""What a start that failed says of itself."""

from service.errors import EngineFailed


def explain(error: Exception) -> str:
    """One line for the log, /readyz and /startup."""
    if isinstance(error, EngineFailed):
        return "the device failed several times in a row; the log has the cause"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}" if unexpected(error) else text


def unexpected(error: Exception) -> Exception | None:
    """The error when it is not one that names its remedy itself: then the log must have its trace."""
    if isinstance(error, ImportError):
        return error  # the installation is broken, perhaps in one of these modules
    # Here: all of them are in modules that the start has imported by now.
    from models.checkpoint_file import WeightsError  # noqa: PLC0415
    from models.config import ConfigError  # noqa: PLC0415
    from warmup.build import BuildError  # noqa: PLC0415
    from warmup.checkpoint import CheckpointError  # noqa: PLC0415
    from warmup.plan import StartError  # noqa: PLC0415
    from warmup.store import StoreError  # noqa: PLC0415

    known = (CheckpointError, ConfigError, WeightsError, StartError, BuildError, StoreError)
    return None if isinstance(error, known) else error
