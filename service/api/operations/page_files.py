"""Builds each static page as one document that loads nothing else.

Styles and scripts become inline elements, and the Content-Security-Policy contains their hashes. Images become data
URIs. The source files also work when they are opened without a server, as they link to the files beside them.
"""

import base64
import hashlib
import re
from pathlib import Path

from snapcap.models.dataclass import dataclass

_FOLDER = Path(__file__).parent / "static"
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w./]+)">')
_SCRIPT = re.compile(r'<script src="([\w./]+)"></script>')
_IMAGE = re.compile(r'(?<=(?:src|ref)=")([\w/-]+\.(?:svg|webp))(?=")')
_METRICS = re.compile(r"<a [^>]*data-metrics[^>]*>[^<]*</a>")
_IMAGE_TYPES = {".svg": "image/svg+xml", ".webp": "image/webp"}
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


@dataclass(frozen=True)
class Page:
    """Holds a finished page and its response headers."""

    body: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return self.headers["ETag"]


def load_page(name: str, metrics: bool) -> Page:
    """Reads a page of the package, such as "index.html", and the files that it includes.

    ``metrics``: keep the link to /metrics. The link must go if /metrics has a port of its own."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(tag: str, file: str) -> str:
        # A browser normalizes line breaks before it hashes the text of an element.
        text = (_FOLDER / file).read_text("utf-8").replace("\r\n", "\n")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{text}</{tag}>"

    document = (_FOLDER / name).read_text("utf-8")
    if not metrics:
        document = _METRICS.sub("", document)
    document = _IMAGE.sub(lambda found: _data_uri(_FOLDER / found[1]), document)
    document = _STYLE.sub(lambda found: inline("style", found[1]), document)
    document = _SCRIPT.sub(lambda found: inline("script", found[1]), document)
    body = document.encode()
    policy = _POLICY.format(scripts=" ".join(hashes["script"]), styles=" ".join(hashes["style"]))
    return Page(
        body,
        {
            "Content-Security-Policy": policy,
            "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            # The browser revalidates the page on each load, so that a new server version shows its own page.
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def _data_uri(file: Path) -> str:
    return f"data:{_IMAGE_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"
