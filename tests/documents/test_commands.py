"""The commands of the README and of every other page, run as they stand there but for the port."""

import shutil
from pathlib import Path
from uuid import uuid4

import pytest
from support.documents.pages import blocks, pages
from support.documents.reader import Reader, require_commands

from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import client

# Their commands find what another run has compiled, instead of compiling for minutes, or starting without.
COMPILED = ("docs/artifacts.md", "docs/without-a-server.md")


def has_commands(page: str) -> bool:
    return any(block.is_run for block in blocks(page))


def read_and_run(page: str, reader: Reader, replaced: tuple[str, str] = ("", "")) -> None:
    """The blocks of a page in order; JSON behind one is what it prints."""
    if missing := require_commands("bash", "curl", "make", "find"):
        pytest.skip(missing)
    ran = False
    with reader:
        for block in blocks(page):
            if block.is_run:
                reader.run(block._replace(text=block.text.replace(*replaced)))
            elif block.language == "json" and ran:
                reader.compare(block)
            ran = block.is_run


@pytest.fixture
def compiled(aws_environment: None, s3_server: str, built_cache: Path, tmp_path: Path) -> dict[str, str]:
    """Variables by which a page's commands find an S3 server with a bucket, in a home folder that has artifacts."""
    store = tmp_path / "home" / ".cache" / "snapcap" / "store"
    shutil.copytree(built_cache / "store", store, ignore=shutil.ignore_patterns("builds"))
    bucket = f"documents-{uuid4().hex}"
    client(S3Options(endpoint_url=s3_server, region="us-east-1")).create_bucket(Bucket=bucket)
    return {
        "BUCKET": bucket,
        "SNAPCAP_PREPARED_WEIGHTS": "on",
        "SNAPCAP_S3_ENDPOINT_URL": s3_server,
        "SNAPCAP_S3_REGION": "us-east-1",
        "SNAPCAP_ALLOW_UNSIGNED": "on",  # nobody has signed the copy, which is not known as built here
    }


@pytest.mark.parametrize("page", [page for page in pages() if page not in COMPILED and has_commands(page)])
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, samples: dict[Path, str]) -> None:
    read_and_run(page, Reader(tmp_path, samples))


@pytest.mark.parametrize("page", COMPILED)
def test_the_commands_of_a_page_about_artifacts_run(
    page: str, tmp_path: Path, samples: dict[Path, str], compiled: dict[str, str]
) -> None:
    assert has_commands(page)
    bucket = compiled.pop("BUCKET")
    read_and_run(page, Reader(tmp_path, samples, **compiled), ("s3://bucket/", f"s3://{bucket}/"))


def test_there_is_an_example_for_each_client() -> None:
    examples = [block.text for block in blocks("docs/api.md") if block.language == "python"]
    imports = [example.splitlines()[0] for example in examples]
    for library, count in {"huggingface_hub": 1, "ollama": 1, "openai": 2, "tritonclient": 1}.items():
        assert sum(library in line for line in imports) == count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```bash\nsnapcap explain --no-such-option\n```\n", "unknown option --no-such-option"),
        ("```bash\nsnapcap serve --prot 1\n```\n", "unknown option --prot"),
        ("```python\nprint('models/demo/samples/pair-1.png')\n```\n", "models/demo/samples/pair-1.png"),
        ("```python\nraise SystemExit('no')\n```\n", "no"),
    ],
)
def test_a_command_that_fails_fails_the_page(
    text: str, said: str, tmp_path: Path, samples: dict[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (block,) = blocks(str(page))  # a path from the root wins over the repository's
    with Reader(tmp_path, samples) as reader, pytest.raises(AssertionError, match=said):
        reader.run(block)


def test_json_that_is_not_what_was_printed_fails(tmp_path: Path, samples: dict[Path, str]) -> None:
    page = tmp_path / "page.md"
    said = [
        ("bash", """echo '{"a": 1.5, "b": "x"}'"""),
        ("json", '{"a": 2.5, "b": "x"}'),
        ("json", '{"a": 1.5, "b": "y"}'),
    ]
    page.write_text("".join(f"```{language}\n{text}\n```\n" for language, text in said))
    command, same, other = blocks(str(page))
    with Reader(tmp_path, samples) as reader:
        reader.run(command)
        reader.compare(same)
        with pytest.raises(AssertionError):
            reader.compare(other)
