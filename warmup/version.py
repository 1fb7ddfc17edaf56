"""Reads the version of snapcap that is running."""

from importlib.metadata import PackageNotFoundError, version


def snapcap_version() -> str:
    """As installed; ``0+source`` for a checkout that was never installed."""
    try:
        return version("snapcap")
    except PackageNotFoundError:
        return "0+source"
