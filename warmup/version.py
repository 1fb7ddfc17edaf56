"""Reads the version of snapcap that is running.

It imports nothing of ours: `snapcap --version` needs no more, and what answers /livez imports it too.
"""

from importlib.metadata import PackageNotFoundError, version


def snapcap_version() -> str:
    """As installed; ``0+source`` for a checkout that was never installed."""
    try:
        return version("snapcap")
    except PackageNotFoundError:
        return "0+source"
