"""The pages as documents: complete in themselves, under a policy that names what is in them, and shipped."""

import base64
import hashlib
import re
import tomllib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from starlette.testclient import TestClient
from support.servers.live_app import create_app

from snapcap.models.processing.image_formats import Reason
from snapcap.service.api.app import Services
from snapcap.service.api.caption import MAX_IMAGES
from snapcap.service.api.caption_schemas import Timings
from snapcap.service.api.operations_schemas import Artifacts, Build, State
from snapcap.service.api.schema_parts import ModelState
from snapcap.service.captioning.options import schema
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.bodies import BodyLimits
from snapcap.warmup.progress.status import COMPONENTS, BucketState
from snapcap.warmup.progress.timeline import PHASES

ROOT = Path(__file__).parents[4]
STATIC = ROOT / "service" / "api" / "static"
PAGES = ("/", "/docs")


class Document(HTMLParser):
    """What a page names, and the text of its styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: dict[str, list[str]] = {"style": [], "script": []}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert "style" not in given, "the policy blocks it"
        assert not any(name.startswith("on") for name in given), "the policy blocks it"
        if tag not in ("a", "form"):
            self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset") and value]
        if tag in self.inline:
            self._inside = tag
            self.inline[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.inline[self._inside][-1] += data


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_everything_in_it(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    document = Document(reply.text)
    assert document.addresses
    assert all(address.startswith("data:image/") for address in document.addresses)
    for style in document.inline["style"]:
        assert "@import" not in style
        assert "url(" not in style
    assert len(document.inline["script"]) >= 2


@pytest.mark.parametrize("path", PAGES)
def test_the_policy_allows_what_is_in_the_page_and_no_more(client: TestClient, path: str) -> None:
    reply = client.get(path)
    policy = dict(part.strip().partition(" ")[::2] for part in reply.headers["content-security-policy"].split(";"))
    document = Document(reply.text)
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        hashes = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in document.inline[tag]
        ]
        assert policy[directive].split() == [f"'sha256-{each}'" for each in hashes]
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_that_is_known_is_not_sent_again(client: TestClient, path: str) -> None:
    first = client.get(path)
    etag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (etag, f'"other", W/{etag}', "*"):
        again = client.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.head(path).headers["etag"] == etag


@pytest.mark.parametrize("path", PAGES)
def test_without_javascript_a_page_says_what_to_do(client: TestClient, path: str) -> None:
    (said,) = re.findall(r"<noscript>(.*?)</noscript>", client.get(path).text)
    assert "needs JavaScript" in said


def test_the_page_links_to_metrics_only_where_they_are(services: Services) -> None:
    for metrics in (True, False):
        app = create_app(services, BodyLimits(1 << 20, 5.0), HttpSettings(metrics_port=None if metrics else 0))
        assert ('href="./metrics"' in TestClient(app).get("/").text) is metrics


def test_the_pages_differ(client: TestClient) -> None:
    assert len({client.get(path).headers["etag"] for path in PAGES}) == len(PAGES)


def test_the_page_is_there_before_the_model_and_when_it_failed(make_services, new_client) -> None:
    services = make_services()
    client = new_client(services)
    assert client.get("/").status_code == 200
    services.readiness.fail("no such folder")
    assert client.get("/").status_code == 200


def test_requests_of_the_page_have_a_name_in_the_metrics(client: TestClient) -> None:
    client.get("/")
    assert 'snapcap_requests_total{api="page",code="200"} 1.0' in client.get("/metrics").text


def test_nothing_is_read_before_a_page_is_asked_for(monkeypatch: pytest.MonkeyPatch, services, new_client) -> None:
    read: list[str] = []

    def read_text(self: Path, *arguments: Any, **keywords: Any) -> str:
        if "static" in self.parts:
            read.append(self.name)
        return original(self, *arguments, **keywords)

    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", read_text)
    client = new_client(services)
    assert read == []
    client.get("/")
    assert read.count("index.html") == 1
    client.get("/")
    assert read.count("index.html") == 1


@pytest.mark.parametrize(
    ("file", "table", "names"),
    [
        ("start/phases.js", "PHASES", PHASES),
        ("start/summary.js", "WORDS", (*get_args(State), *get_args(ModelState))),
        ("start/buckets.js", "COMPONENTS", COMPONENTS),
        ("start/buckets.js", "STATES", get_args(BucketState)),
        ("start/buckets.js", "RESULTS", get_args(Artifacts.model_fields["result"].annotation)),
        ("start/buckets.js", "BUILDS", get_args(Build.model_fields["state"].annotation)),
        ("captioning/panel.js", "TIMES", Timings.model_fields.keys() - {"total"}),
    ],
)
def test_the_page_has_words_for_whatever_the_server_may_say(file: str, table: str, names: Iterable[str]) -> None:
    script = (STATIC / file).read_text()
    (entries,) = re.findall(rf"^const {table} = [{{\[]\n?(.*?)[}}\]];$", script, re.DOTALL | re.MULTILINE)
    words = set(re.findall(r'(?:^ *|[{,] *)\[?"?(\w+)"?[:,] ', entries, re.MULTILINE))
    assert words >= set(names)


def test_the_page_asks_for_no_more_than_the_server_takes() -> None:
    page = (STATIC / "index.html").read_text()
    inputs = re.findall(r'<input [^>]*name="\w+".*?>', page)
    every = [dict(re.findall(r'(\w+)="(\w+)"', each)) for each in inputs]
    fields = {each["name"]: each for each in every}
    known = schema()
    for name in ("num_beams", "max_new_tokens"):
        # Not -1, which is "not given": the page has an empty field for that.
        numbers = known[name]["anyOf"][0] if "anyOf" in known[name] else known[name]
        assert fields[name]["min"] == str(numbers["minimum"])
        assert fields[name]["max"] == str(numbers["maximum"])
    assert fields["prompt"]["maxlength"] == str(known["prompt"]["maxLength"])
    (pictures,) = re.findall(r"PIECE = { pictures: (\d+)", (STATIC / "captioning" / "batch.js").read_text())
    assert int(pictures) == MAX_IMAGES


def test_the_page_knows_every_reason_for_which_a_copy_may_be_taken() -> None:
    asking = (STATIC / "captioning" / "asking.js").read_text()
    reasons = set(re.findall(r'"(\w+)"', "".join(re.findall(r"const OF_\w+ = (\[.*?\]);", asking))))
    assert reasons
    assert reasons <= set(get_args(Reason))


def test_every_file_of_the_pages_is_used_and_shipped() -> None:
    folder = STATIC
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    pages = {name for name in files if name.endswith(".html")}
    named = set(
        re.findall(r'(?:src|href)="([\w/.-]+\.\w+)"', "".join((folder / page).read_text() for page in pages))
    )
    assert files - pages == {name for name in named if not name.startswith("./")}
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "snapcap.service"
    ]
    shipped = {
        str(file.relative_to(ROOT / "service")) for pattern in data for file in (ROOT / "service").glob(pattern)
    }
    assert shipped >= {f"api/static/{name}" for name in files}
