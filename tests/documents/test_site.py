"""The site that `make docs` builds: strict, whole, and loaded from nowhere else."""

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageStat
from playwright.sync_api import Page, expect
from support.documents.pages import ROOT, pages
from support.servers.page import assert_accessible
from support.servers.server_process import clean_environment

OpenPage = Callable[..., Page]
FILES = ("mkdocs.yml", "README.md", "LICENSE", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
FOLDERS = ("docs", "deploy", "benchmarks", "models", "service")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="MKDOCS-MATERIAL IS NOT INSTALLED: pip install -e '.[docs]' TO BUILD THE SITE",
)


def build(root: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    # Not --quiet: what mkdocs does not print is no error to it either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Writes nothing."""

    class Patient(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # 5 by default; a browser opens more connections than that at once

    handler = functools.partial(Quiet, directory=str(site))
    with Patient(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_every_page_is_built_once_at_an_address_of_its_own(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in site.rglob("index.html")}
    assert len(built) == len(pages())
    assert {"index.html", "api/index.html", "deploy/kubernetes/index.html", "project/security/index.html"} <= built


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    by_html = r"<(?:link|script|img|source|iframe)\b[^>]*?(?:src|href|srcset)=[\"']?(https?:[^\"' >]+)"
    by_css = r"(?:url\(|@import )[\"']?(https?:[^)\"' ]+)"
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert re.findall(f"{by_html}|{by_css}", path.read_text()) == [], path


def test_no_page_is_left_without_a_link_from_the_readme_s_pages(site: Path) -> None:
    """What only the navigation leads to is lost on GitHub."""
    linked = set()
    for page in pages():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            linked.add(((ROOT / page).parent / target).resolve().relative_to(ROOT.resolve()).as_posix())
    assert set(pages()) - linked == {"README.md"} - linked


def test_what_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("*.py", "*.safetensors") if name != "docs" else None
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, root)
    wrong = [
        ("docs/api.md", "[x](nowhere.md)", "'docs/api.md' contains a link 'nowhere.md'"),
        ("docs/api.md", "[x](operations.md#lost)", "'docs/operations.md' does not contain an anchor '#lost'"),
        ("README.md", "[x](#lost)", "'README.md' contains a link '#lost', but there is no such anchor"),
        ("deploy/container/README.md", "[x](/api/)", "README.md' contains an absolute link '/api/'"),
        ("docs/left-out.md", "# Left out", "docs/left-out.md"),
    ]
    for page, text, _ in wrong:
        with (root / page).open("a") as file:
            file.write(f"\n{text}\n")
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    assert f"Aborted with {len(wrong)} warnings in strict mode" in done.stdout
    for _, _, said in wrong:
        assert said in done.stderr


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_in_a_browser(open_page: OpenPage, address: str, scheme: str) -> None:
    page = open_page(address, color_scheme=scheme)
    expect(page.get_by_role("heading", level=1)).to_contain_text("snapcap")
    picture = page.locator("picture img")
    assert f"page-{scheme}.png" in picture.evaluate("(image) => image.currentSrc")
    assert picture.evaluate("(image) => image.complete && image.naturalWidth > 0")
    assert_accessible(page)


def test_the_pictures_of_the_page_can_be_taken_again(tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("CHROMIUM IS NOT INSTALLED: apt-get install chromium TO TAKE THE PICTURES OF THE PAGE")
    tool = ROOT / "docs" / "tools" / "screenshots.py"
    options = ("--folder", str(tmp_path), "--backend", "eager", "--buckets", "1", "--cache-dir", str(tmp_path))
    command = [sys.executable, str(tool), *options]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    light, dark = (Image.open(tmp_path / f"page-{scheme}.png").convert("L") for scheme in ("light", "dark"))
    kept = Image.open(ROOT / "docs" / "images" / "page-light.png")
    assert light.size == dark.size == kept.size
    assert ImageStat.Stat(light).mean[0] > 2 * ImageStat.Stat(dark).mean[0]


def test_the_search_finds_a_word(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    field = page.get_by_role("textbox", name="Search")
    field.click()
    expect(page.locator(".md-search-result__meta")).to_have_text("Type to start searching", timeout=60_000)
    field.fill("prepared weights")
    field.press("End")  # it listens to keys
    expect(page.locator(".md-search-result__item").first).to_contain_text("weights", timeout=60_000)


def test_no_page_is_wider_than_a_phone(open_page: OpenPage, address: str) -> None:
    for path in ("", "configuration/", "how-it-works/"):
        page = open_page(address + path, viewport={"width": 360, "height": 740}, is_mobile=True)
        assert page.evaluate("() => document.scrollingElement.scrollWidth") <= 360
