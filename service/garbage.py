"""The garbage collector, which is off during the start."""

import gc


def settle() -> None:
    """Collect from now on. `serve` has put collections off. What the imports made stays for good: later ones need
    not look at it, nor write to memory that forked processes share."""
    gc.freeze()
    gc.enable()
