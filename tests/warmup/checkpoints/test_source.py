"""What a model's source is called, which revision is meant, and whether this machine has it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints.published import upload_checkpoint

from snapcap.warmup.checkpoints.local import CheckpointError
from snapcap.warmup.checkpoints.source import (
    current_identity,
    downloaded_identity,
    folder_at_hand,
    is_publishable,
    published_name,
    resolve_checkpoint,
)
from snapcap.warmup.machine import capacity
from snapcap.warmup.options import ComputeOptions, ImageOptions, ModelOptions, S3Options, StartOptions, StoreOptions
from snapcap.warmup.start.published import may_be_published
from snapcap.warmup.weights.find import model_factors

COMMIT, OTHER = "0123456789" * 4, "abcdef0123" * 4
FAR = 1e9


@pytest.mark.parametrize(
    ("source", "publishable"),
    [
        ("s3://bucket/model", True),
        ("owner/name", True),
        (f"owner/name@{COMMIT}", True),
        ("demo", False),
        ("./model", False),
        ("/models/mine", False),
        ("~/model", False),
        ("", False),
    ],
)
def test_only_a_name_that_means_the_same_everywhere_is_published(source: str, publishable: bool) -> None:
    assert is_publishable(source) is publishable


def test_a_folder_that_is_named_as_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_publishable("owner/name")


def test_a_source_has_one_spelling() -> None:
    assert published_name("s3://bucket/model/") == published_name("s3://bucket/model")
    assert published_name("owner/name") == "owner/name"
    sources = (("owner/name", "cpu"), ("owner/name", "cuda:0"), ("owner/other", "cpu"))
    first, *others = (
        model_factors(StartOptions(ModelOptions(source), ComputeOptions(device, "float32")))
        for source, device in sources
    )
    assert first not in others
    assert first["torch.version"]
    assert first["source.weights"]


def test_weights_of_other_lengths_are_published_beside_each_other() -> None:
    """A start with such lengths needs weights of another name, and could not use those that it fetched."""
    model, images = ModelOptions("owner/name"), ImageOptions()
    compute = ComputeOptions("cpu", "float32")
    plain, *others = (
        model_factors(StartOptions(each, compute, sizes))
        for each, sizes in (
            (model, images),
            (replace(model, text_tokens=200), images),
            (model, replace(images, max_image_tokens=512)),
        )
    )
    assert plain not in others
    assert others[0] != others[1]


def test_a_model_is_published_for_processors_that_run_it_in_the_same_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def dtypes(**compute: str) -> list[object]:
        options = StartOptions(ModelOptions("owner/name"), ComputeOptions(**compute))
        found: list[object] = []
        for instructions in (["avx512f"], ["avx512_bf16"]):
            monkeypatch.setattr(capacity, "instruction_set", lambda instructions=instructions: instructions)
            found.append(model_factors(options)["model.dtype"])
        return found

    assert dtypes(device="cpu") == ["float32", "auto"], "the model says which"
    assert dtypes(device="cpu", dtype="float32") == ["float32", "float32"]
    assert dtypes(device="cuda:0") == ["bfloat16", "bfloat16"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def download(hub: Path, commit: str, branch: str = "main") -> Path:
    """As huggingface_hub leaves a repository."""
    folder = hub / "models--owner--name"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    return snapshot


def test_a_commit_is_its_own_identity(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", never)
    source = f"owner/name@{COMMIT}"
    assert current_identity(source, S3Options(), FAR) == {"commit": COMMIT}
    assert not folder_at_hand(source, hub, S3Options())
    folder = download(hub, COMMIT)
    assert folder_at_hand(source, hub, S3Options())
    assert not folder_at_hand(f"owner/name@{OTHER}", hub, S3Options())
    assert downloaded_identity(source, folder) == {"commit": COMMIT}


@pytest.mark.parametrize(("source", "revision"), [("owner/name", None), ("owner/name@dev", "dev")])
def test_the_hub_is_asked_for_the_commit_of_a_branch(
    source: str, revision: str | None, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def model_info(_: object, repository: str, **given: Any) -> SimpleNamespace:
        asked.append((repository, given["revision"]))
        assert given["timeout"] > 0
        return SimpleNamespace(sha=COMMIT, siblings=None)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    assert current_identity(source, S3Options(), FAR) == {"commit": COMMIT}
    assert asked == [("owner/name", revision)]
    download(hub, OTHER, revision or "main")
    assert folder_at_hand(source, hub, S3Options())


@pytest.mark.parametrize("answer", [None, "main", "../../x", OSError("no network")])
def test_a_hub_that_names_no_commit_is_an_error(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*_: object, **__: object) -> SimpleNamespace:
        if isinstance(answer, OSError):
            raise answer
        return SimpleNamespace(sha=answer)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(CheckpointError, match="owner/name"):
        current_identity("owner/name", S3Options(), FAR)


def test_a_reference_that_leads_elsewhere_is_not_followed(hub: Path, tmp_path: Path) -> None:
    download(hub, COMMIT)
    (hub / "models--owner--name" / "refs" / "main").write_text("../../../elsewhere")
    assert not folder_at_hand("owner/name", hub, S3Options())
    with pytest.raises(CheckpointError, match="names no commit"):
        downloaded_identity("owner/name", tmp_path)


def test_the_identity_of_a_prefix_is_what_was_downloaded(
    s3: Any, s3_server: str, demo_folder: Path, tmp_path: Path
) -> None:
    source = upload_checkpoint(s3, demo_folder, "bucket", "models/demo")
    options = S3Options(endpoint_url=s3_server)
    assert not folder_at_hand(source, tmp_path, options)
    folder = resolve_checkpoint(source, tmp_path, options)
    assert folder_at_hand(source, tmp_path, options)
    now = current_identity(f"{source}/", options, FAR, s3)
    assert downloaded_identity(source, folder) == now
    assert {"config.json", "model.safetensors"} <= now.keys()
    s3.put_object(Bucket="bucket", Key="models/demo/config.json", Body=b"{}")
    assert current_identity(source, options, FAR) != now
    (folder / "model.safetensors").unlink()
    assert not folder_at_hand(source, tmp_path, options), "what is there in part is not there"


def test_a_start_asks_only_where_something_may_be_published(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(source: str = "owner/name", store: str = "s3://bucket", **model: Any) -> StartOptions:
        return StartOptions(ModelOptions(source, tmp_path / "cache", **model), store=StoreOptions(store))

    assert may_be_published(options())
    assert not may_be_published(options("demo"))
    assert not may_be_published(options(prepared_weights=False))
    for odd in ("a\0b", "a" * 10_000, "s3://", "~nobody/x"):
        may_be_published(options(odd))  # raises nothing: what is wrong with it is for resolving to say
    folder = tmp_path / "folder"
    assert not may_be_published(options(store=str(folder)))
    (folder / "models").mkdir(parents=True)
    (folder / "models" / ("0" * 64 + ".json")).touch()
    assert may_be_published(options(store=str(folder)))
    download(hub, COMMIT)
    assert not may_be_published(options())
