"""Runs a process of a model that wakes: its engine process, or the parent of its decode processes."""

import os
import sys
import traceback

from snapcap.service.ipc.fork import spawned_end


def main(arguments: list[str]) -> int:
    """Serves until the socket is closed. Returns the exit status. `arguments`: two for `spawned_end`, the kind of
    process, and for the decode processes their number and the format and level of the log."""
    end = spawned_end(arguments)
    kind, *more = arguments[2:]
    if kind == "engine":
        from snapcap.service.server.processes import import_and_serve  # noqa: PLC0415  other processes do not need it

        return import_and_serve(end)
    from snapcap.service.images.parent import serve_image_processes  # noqa: PLC0415  likewise
    from snapcap.service.telemetry import logs  # noqa: PLC0415  likewise

    count, style, level = more
    logs.configure(style, level)
    return serve_image_processes(int(count), end)


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # a thread in native code would crash an interpreter that is finalized
