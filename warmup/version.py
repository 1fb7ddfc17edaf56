"""Reads the version of snapcap that is running.

The process that answers /livez imports this module. So the module imports nothing else of snapcap, and imports the
metadata reader only when a caller needs the version.
"""


def snapcap_version() -> str:
    """Returns the installed version, or ``0+source`` for a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  a fiftieth of a start

    try:
        return version("snapcap")
    except PackageNotFoundError:
        return "0+source"
