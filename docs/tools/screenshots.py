"""Takes the README's pictures of the server's page, in light and dark: `python docs/tools/screenshots.py`.

The program starts a server with the demo model on a free port, and needs Chromium and the packages of
`snapcap[dev]`. All arguments except `--folder` are options of the server. Build first, so that the pictures show a
compiled start."""

import argparse
import io
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, ViewportSize, sync_playwright

_FOLDER = Path(__file__).parents[1] / "images"
_SIZE: ViewportSize = {"width": 880, "height": 885}
_SCALE = 1.25
_COLOURS = 256  # a page is few colours and some small pictures
_READY_S = 60


def main(arguments: list[str]) -> None:
    """Writes `page-light.png` and `page-dark.png`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="folder for the pictures (docs/images)")
    known, options = parser.parse_known_args(arguments)
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "snapcap",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        address.rpartition(":")[2],
    ]
    server = subprocess.Popen([*command, "--build", "off", *options])  # noqa: S603 - ourselves
    try:
        _wait_ready(address)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                _save(_picture(browser, address, scheme), known.folder / f"page-{scheme}.png")
    finally:
        server.terminate()
        server.wait(30)


def _wait_ready(address: str) -> None:
    end = time.monotonic() + _READY_S
    while True:
        try:
            urllib.request.urlopen(f"{address}/readyz", timeout=5).close()  # noqa: S310 - our own server
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


def _picture(browser: Browser, address: str, scheme: str) -> bytes:
    """Returns a PNG of the page with a captioned sample."""
    page = browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light", viewport=_SIZE, device_scale_factor=_SCALE
    )
    page.goto(f"{address}/")
    page.locator(".sample").first.click()
    page.wait_for_selector("#measured:not([hidden])")  # the caption is complete
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)  # the bars have grown
    taken: bytes = page.screenshot()
    page.close()
    return taken


def _save(picture: bytes, path: Path) -> None:
    """Saves a picture with few colours, so that a clone of the repository stays small."""
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    path.parent.mkdir(exist_ok=True)
    image.save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
