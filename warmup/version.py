"""Reads the version of snapcap that is running.

It imports nothing of ours, and what reads metadata only when it is asked: what answers /livez imports it too.
"""


def snapcap_version() -> str:
    """As installed; ``0+source`` for a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  a fiftieth of a start

    try:
        return version("snapcap")
    except PackageNotFoundError:
        return "0+source"
