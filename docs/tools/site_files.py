"""Gives mkdocs the repository's documents and pictures, each at its own path.

So a link that works on GitHub works in the site. By itself mkdocs knows the files of `docs/` alone, and links from
there to anything else would lead nowhere."""

import posixpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Beside the pages in `nav`: what they show and link to.
_ASSETS = (
    "LICENSE",
    "docs/images/*.png",
    "docs/tools/*.css",
    "benchmarks/results/*.json",
    "benchmarks/results/*.png",
    "models/demo/samples/*.png",
    "service/api/static/mark.svg",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and ours by their paths from the root of the repository.

    A page in `docs/` that `nav` leaves out is among them, so that mkdocs says so."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    root = Path(config.config_file_path).parent
    pages = {*_pages(config.nav), *(f"docs/{each.name}" for each in (root / "docs").glob("*.md"))}
    found = [_file(root, path, config, _address(path)) for path in sorted(pages)]
    assets = (path for pattern in _ASSETS for path in sorted(root.glob(pattern)))
    return Files([*theme, *found, *(_file(root, path.relative_to(root).as_posix(), config) for path in assets)])


def _pages(nav: object) -> list[str]:
    """The paths in a tree of titles and pages."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return [path for each in below for path in _pages(each)]


def _address(path: str) -> str:
    """Returns the address of a page: `docs/api.md` at `api/`, `deploy/x/README.md` at `deploy/x/`, README.md at the
    root. A page beside README.md, such as SECURITY.md, has its address below `project/`."""
    folder, name = posixpath.split(path)
    stem = "" if name == "README.md" else name.removesuffix(".md").lower()
    folder = "" if folder == "docs" else folder if folder or not stem else "project"
    return posixpath.join(folder, stem, "index.html")


def _file(root: Path, path: str, config: MkDocsConfig, address: str | None = None) -> File:
    return File(path, str(root), config.site_dir, config.use_directory_urls, dest_uri=address)
