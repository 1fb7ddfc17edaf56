"""Captions images: offers the server's engine as a library, and the command line.

    from snapcap import Captioner

    with Captioner("demo") as captioner:
        print(captioner("photo.jpg").text)

Each name is imported on first use: the server starts through this package too, and needs none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapcap.captioner import Caption, Captioner, CaptionError
    from snapcap.models.errors import UserError

__all__ = ["Caption", "CaptionError", "Captioner", "UserError"]

_MODULES = {
    "Caption": "snapcap.captioner",
    "CaptionError": "snapcap.captioner",
    "Captioner": "snapcap.captioner",
    "UserError": "snapcap.models.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
