"""Gives mkdocs the repository's documents and pictures, each at its own path.

So a link that works on GitHub works on the site. By default mkdocs knows only the files of `docs/`, and links from
there to other files would be broken."""

import posixpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Files that the pages in `nav` show and link to.
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
    """Returns the theme's files, and the repository's by their paths from its root.

    A page in `docs/` that `nav` leaves out is included, so that mkdocs warns about it."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    root = Path(config.config_file_path).parent
    pages = {*_pages(config.nav), *(f"docs/{each.name}" for each in (root / "docs").glob("*.md"))}
    found = [_file(root, path, config, _address(path)) for path in sorted(pages)]
    assets = (path for pattern in _ASSETS for path in sorted(root.glob(pattern)))
    return Files([*theme, *found, *(_file(root, path.relative_to(root).as_posix(), config) for path in assets)])


def _pages(nav: object) -> list[str]:
    """Returns the paths in a tree of titles and pages."""
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
