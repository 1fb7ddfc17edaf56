"""A model comes from a store through a worker process; whatever is wrong there is a reason, and no file."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from support.checkpoints.published import upload_checkpoint

from snapcap.models.config import ModelConfig
from snapcap.warmup.artifacts.fetch import Fetched, NotFetchedError
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.artifacts.manifest import CHUNK_BYTES, MAX_ENVELOPE_BYTES, Manifest, open_envelope, seal
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import OWNER, Signer, generate_key, load_signer
from snapcap.warmup.artifacts.store import MODELS, WEIGHTS, blob_name
from snapcap.warmup.build.release import publish_weights
from snapcap.warmup.checkpoints.source import folder_at_hand
from snapcap.warmup.options import ComputeOptions, ModelOptions, S3Options, StartOptions, StoreOptions
from snapcap.warmup.plan.checkpoint import Checkpoint, read_checkpoint
from snapcap.warmup.plan.plan import make_plan
from snapcap.warmup.start.published import may_be_published
from snapcap.warmup.weights.find import FoundWeights
from snapcap.warmup.weights.prepare import prepare_weights
from snapcap.warmup.weights.published import ModelFetcher

pytestmark = pytest.mark.usefixtures("no_wait")


class Shop(NamedTuple):
    """A store on S3 with the demo model's weights, and where the model itself is."""

    store: S3Store
    options: StartOptions
    signer: Signer

    def at(self, cache: Path, **store: Any) -> StartOptions:
        """The options of a machine that trusts who signed them."""
        model = replace(self.options.model, cache_dir=cache)
        given = replace(self.options.store, sign_key=None, **store)
        return replace(self.options, model=model, store=given)

    def names(self, prefix: str) -> list[str]:
        listed = self.store.s3.list_objects_v2(Bucket=self.store.bucket, Prefix=f"{self.store.prefix}/{prefix}/")
        return [entry["Key"].removeprefix(f"{self.store.prefix}/") for entry in listed.get("Contents", ())]

    def manifest(self) -> Manifest:
        (name,) = self.names("models")
        stored = self.store.read(name, MAX_ENVELOPE_BYTES)
        assert stored is not None
        return open_envelope(stored.data, OWNER, name.removeprefix("models/").removesuffix(".json"))

    def change(self, signer: Signer | None = None, **changes: Any) -> None:
        manifest = self.manifest()
        weights = replace(manifest.model_weights, **changes)
        sealed = seal(replace(manifest, weights=weights), signer or self.signer)
        self.store.write(f"models/{manifest.key}.json", sealed)


@pytest.fixture(scope="session")
def prepared_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the demo model's prepared weights, once they are: those of any copy of it."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def kind() -> str:
    """Which S3 server; moto unless a test is parametrized."""
    return "moto"


@pytest.fixture(scope="session")
def shops() -> dict[str, Shop]:
    """By the kind of server, filled by the first test that asks for one."""
    return {}


@pytest.fixture
def fresh_shop(
    kind: str, make_s3_store: Callable[[str], S3Store], demo_folder: Path, prepared_demo: Path
) -> Callable[[], Shop]:
    """``fresh_shop()`` publishes the demo model in a place of its own."""

    def open_shop() -> Shop:
        store, keys = make_s3_store(kind), prepared_demo / "keys"
        if not keys.exists():
            keys.mkdir()
            generate_key(keys / "key")
        source = upload_checkpoint(store.s3, demo_folder, store.bucket, f"checkpoints/{uuid4().hex}")
        options = StartOptions(
            ModelOptions(source, prepared_demo),
            ComputeOptions("cpu", "float32", buckets=(1,), threads=1),
            store=StoreOptions(store.location, (keys / "key.pub",), sign_key=keys / "key", weights=True),
            s3=S3Options(endpoint_url=store.s3.meta.endpoint_url, region="us-east-1"),
        )
        checkpoint = read_checkpoint(options)
        plan = make_plan(checkpoint.config, options)
        prepared = prepare_weights(checkpoint.folder, plan, options.store_folder, thorough=False)
        assert prepared.result in ("written", "kept")
        published = publish_weights(checkpoint, plan, options)
        assert published.result == "published", published.reason
        assert "MiB" in published.reason
        assert publish_weights(checkpoint, plan, options).result == "exists"
        return Shop(store, options, load_signer(keys / "key"))

    return open_shop


@pytest.fixture
def shop(
    kind: str, s3_options: Callable[[str], S3Options], fresh_shop: Callable[[], Shop], shops: dict[str, Shop]
) -> Shop:
    """Shared: whoever changes it takes ``own_shop``."""
    s3_options(kind)  # with its credentials
    if kind not in shops:
        shops[kind] = fresh_shop()
    return shops[kind]


@pytest.fixture
def own_shop(shop: Shop) -> Shop:
    """Another prefix with the same objects."""
    store = replace(shop.store, prefix=f"{uuid4().hex}/copy")
    for name in (*shop.names("models"), *shop.names("blobs/sha256")):
        copied = {"Bucket": store.bucket, "Key": f"{shop.store.prefix}/{name}"}
        store.s3.copy_object(Bucket=store.bucket, Key=f"{store.prefix}/{name}", CopySource=copied)
    options = replace(shop.options, store=replace(shop.options.store, address=store.location))
    return Shop(store, options, shop.signer)


def brought(options: StartOptions) -> FoundWeights:
    """As a start does it, without the packages."""
    fetcher = ModelFetcher(options)
    try:
        described = fetcher.describe()
        config = ModelConfig.from_folder(described.folder)
        checkpoint = Checkpoint.of(options, described.folder, config)
        return fetcher.weights(described, checkpoint, make_plan(config, options))
    except NotFetchedError as error:
        return FoundWeights(error.fetched.result, error.fetched.reason)
    finally:
        fetcher.close()


def left(options: StartOptions) -> list[str]:
    return sorted(
        path.name for path in (options.store_folder / WEIGHTS).glob("*") if not path.name.endswith(".lock")
    )


@pytest.mark.parametrize("kind", ["moto", "ceph"])
def test_a_machine_that_has_nothing_gets_what_was_prepared(shop: Shop, tmp_path: Path, prepared_demo: Path) -> None:
    options = shop.at(tmp_path / "empty")
    assert may_be_published(options)
    found = brought(options)
    assert (found.result, found.bytes_fetched) == ("hit", shop.manifest().model_weights.size), found.reason
    assert found.mapped is not None
    (prepared,) = (prepared_demo / "store" / WEIGHTS).glob("*.safetensors")
    assert bytes(found.mapped.memory) == prepared.read_bytes()
    assert left(options) == [f"{shop.manifest().model_weights.content}.safetensors"]
    (manifest,) = (options.store_folder / MODELS).glob("*.json")
    os.utime(manifest, (0, 0))
    again = brought(options)
    assert (again.result, again.bytes_fetched) == ("hit", 0)
    assert manifest.stat().st_mtime > 0, "what is used is not what is removed first"
    assert not (tmp_path / "empty" / "checkpoints").exists(), "the checkpoint was never read"


def test_who_has_the_checkpoint_asks_nobody(shop: Shop, tmp_path: Path) -> None:
    options = shop.at(tmp_path / "empty")
    assert not folder_at_hand(options.model.source, options.model.cache_dir, options.s3)
    read_checkpoint(options)
    assert folder_at_hand(options.model.source, options.model.cache_dir, options.s3)
    assert not may_be_published(options)
    elsewhere = shop.at(tmp_path / "other")
    assert may_be_published(elsewhere)
    off = replace(elsewhere, model=replace(elsewhere.model, prepared_weights=False))
    assert not may_be_published(off)
    folder = replace(elsewhere, model=replace(elsewhere.model, source="demo"))
    assert not may_be_published(folder)
    local = replace(elsewhere, store=StoreOptions())
    assert not may_be_published(local), "an empty folder has nothing"


def test_a_changed_checkpoint_is_a_miss(fresh_shop: Callable[[], Shop], tmp_path: Path) -> None:
    shop = fresh_shop()
    bucket, _, key = shop.options.model.source.removeprefix("s3://").partition("/")
    body = bytearray(shop.store.s3.get_object(Bucket=bucket, Key=f"{key}/model.safetensors")["Body"].read())
    body[-1] ^= 1
    shop.store.s3.put_object(Bucket=bucket, Key=f"{key}/model.safetensors", Body=bytes(body))
    found = brought(shop.at(tmp_path / "empty"))
    assert (found.result, "another revision" in found.reason) == ("miss", True)
    for entry in shop.store.s3.list_objects_v2(Bucket=bucket, Prefix=key)["Contents"]:
        shop.store.s3.delete_object(Bucket=bucket, Key=entry["Key"])
    found = brought(shop.at(tmp_path / "empty"))
    assert (found.result, "nothing under" in found.reason) == ("error", True)


def flip(shop: Shop, place: int) -> None:
    name = blob_name(shop.manifest().model_weights.file)
    stored = shop.store.read(name, 1 << 30)
    assert stored is not None
    body = bytearray(stored.data)
    body[place] ^= 1
    shop.store.write(name, bytes(body))


def cut(shop: Shop) -> None:
    name = blob_name(shop.manifest().model_weights.file)
    stored = shop.store.read(name, 1 << 30)
    assert stored is not None
    shop.store.write(name, stored.data[:-1])


def stranger(shop: Shop, tmp_path: Path) -> None:
    generate_key(tmp_path / "stranger")
    shop.change(load_signer(tmp_path / "stranger"))


def of_another_model(shop: Shop) -> None:
    """Signed by who is trusted, and of a source that another model may have."""
    manifest = shop.manifest()
    factors = {**manifest.factors, "model.source": "s3://bucket/other"}
    other = replace(manifest, factors=factors, key=artifact_key(factors))
    shop.store.write(f"models/{manifest.key}.json", seal(other, shop.signer))


def huge(shop: Shop) -> None:
    size = 300 * CHUNK_BYTES
    shop.change(file=replace(shop.manifest().model_weights.file, size=size), chunks=("0" * 64,) * 300)


def gone(shop: Shop) -> None:
    shop.store.delete(blob_name(shop.manifest().model_weights.file))


ATTACKS: dict[str, tuple[Callable[[Shop, Path], None], str, str]] = {
    "a flipped byte in a chunk": (lambda shop, _: flip(shop, -1), "corrupt", "chunk 0"),
    "a flipped byte in the header": (lambda shop, _: flip(shop, 20), "corrupt", "chunk 0"),
    "a cut object": (lambda shop, _: cut(shop), "corrupt", "missing, or has the wrong size"),
    "no object": (lambda shop, _: gone(shop), "corrupt", "missing, or has the wrong size"),
    "a stranger's signature": (stranger, "untrusted", "no trusted key"),
    "another model's manifest": (lambda shop, _: of_another_model(shop), "corrupt", "is that of key"),
    "another checkpoint's weights": (lambda shop, _: shop.change(checkpoint="0" * 64), "corrupt", "something else"),
    "a huge size": (lambda shop, _: huge(shop), "corrupt", "missing, or has the wrong size"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_becomes_weights(attack: str, own_shop: Shop, tmp_path: Path) -> None:
    act, result, said = ATTACKS[attack]
    act(own_shop, tmp_path)
    options = own_shop.at(tmp_path / "empty")
    found = brought(options)
    assert (found.result, found.mapped) == (result, None), found.reason
    assert said in found.reason
    assert "\n" not in found.reason
    assert [name for name in left(options) if name.startswith(".")] == []
    assert attack == "another checkpoint's weights" or left(options) == []


def test_two_machines_that_share_a_cache_download_once(shop: Shop, tmp_path: Path) -> None:
    options = shop.at(tmp_path / "shared")
    results: list[FoundWeights] = []
    threads = [threading.Thread(target=lambda: results.append(brought(options))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found.result for found in results] == ["hit", "hit"]
    assert sorted(found.bytes_fetched for found in results) == [0, shop.manifest().model_weights.size]


def test_a_revoked_key_is_no_hit(shop: Shop, tmp_path: Path) -> None:
    options = shop.at(tmp_path / "empty")
    assert brought(options).result == "hit"
    generate_key(tmp_path / "new")
    assert brought(shop.at(tmp_path / "empty", trusted_keys=(tmp_path / "new.pub",))).result == "untrusted"
    assert brought(shop.at(tmp_path / "empty", trusted_keys=())).result == "error", "S3 without any trust"


def test_what_never_answers_is_given_up(aws_environment: None, black_hole: str, shop: Shop, tmp_path: Path) -> None:
    s3 = S3Options(endpoint_url=black_hole, region="us-east-1", read_timeout=60)
    options = replace(shop.at(tmp_path / "empty", deadline=0.5), s3=s3)
    began = time.monotonic()
    found = brought(options)
    assert found.result == "error"
    assert time.monotonic() - began < 30, "and not 60"


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``answering(text)``: workers answer so to whatever they are asked."""

    def make(answer: str) -> None:
        program = tmp_path / "python"
        program.write_text(
            "#!/bin/sh\nread job\necho '{\"started\": true}'\nwhile read task; do echo '" + answer + "'; done\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return make


@pytest.mark.parametrize("answer", ["no JSON", "[]", "{}", '{"result": "great"}', '{"result": "miss"}'])
def test_a_worker_that_answers_nothing_sensible_is_an_error(
    answer: str, answering: Callable[[str], None], shop: Shop, tmp_path: Path
) -> None:
    answering(answer)
    assert brought(shop.at(tmp_path / "empty")).result == "error"


def test_a_worker_that_claims_a_hit_is_not_believed(
    answering: Callable[[str], None], shop: Shop, tmp_path: Path
) -> None:
    options = shop.at(tmp_path / "empty")
    hit = {"result": "hit", "reason": "", "bytes_fetched": 1, "differences": [], "unasked": ""}
    answering(json.dumps(hit))
    assert brought(options).result == "error"
    (tmp_path / "other").mkdir()
    stolen = shop.at(tmp_path / "other")
    stolen.store_folder.mkdir(mode=0o700)
    for name in shop.names("models"):
        stored = shop.store.read(name, MAX_ENVELOPE_BYTES)
        assert stored is not None
        (stolen.store_folder / "models").mkdir(mode=0o700)
        (stolen.store_folder / name).write_bytes(stored.data)
    assert brought(stolen).result == "error", "the small files are not there"


def test_what_is_still_being_written_is_never_mapped(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has died after its answer, and another one writes the same file in its place."""
    options = shop.at(tmp_path / "empty")
    assert brought(options).result == "hit"
    (file,) = (options.store_folder / WEIGHTS).glob("*.safetensors")
    data = file.read_bytes()
    file.unlink()
    (options.store_folder / WEIGHTS / f".{file.stem}.writing").write_bytes(data[:-100] + bytes(100))

    def answer(self: ModelFetcher, task: Any, end: float | None = None) -> Fetched:
        return Fetched("hit", "", bytes_fetched=len(data))

    monkeypatch.setattr(ModelFetcher, "_ask", answer)
    assert brought(options).result == "error"


def test_damaged_weights_that_were_published_to_the_folder_are_removed_and_fetched_again(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner vouches for them, so they are not what was fetched, which has a name of its own."""
    options = shop.at(tmp_path / "empty")
    assert brought(options).result == "hit"
    local, manifest = FolderStore.open(options.store_folder), shop.manifest()
    stored = local.read(f"models/{manifest.key}.json", MAX_ENVELOPE_BYTES)
    assert stored is not None
    local.vouch(stored.data)
    (file,) = (options.store_folder / WEIGHTS).glob("*.safetensors")
    blob = local.path(blob_name(manifest.model_weights.file))
    blob.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.rename(blob)
    assert brought(options).bytes_fetched == 0, "they are at hand"
    data = blob.read_bytes()
    blob.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    assert brought(options).result == "corrupt"
    assert not blob.exists()
    (line,) = [record for record in caplog.records if record.getMessage().startswith("damaged weights removed")]
    assert line.fields["file"] == blob_name(manifest.model_weights.file)  # type: ignore[attr-defined]
    assert brought(options).bytes_fetched == len(data)


def test_weights_that_others_could_have_written_are_refused(shop: Shop, tmp_path: Path) -> None:
    options = shop.at(tmp_path / "empty")
    assert brought(options).result == "hit"
    (file,) = (options.store_folder / WEIGHTS).glob("*.safetensors")
    file.chmod(0o666)
    found = brought(options)
    assert (found.result, "others may write" in found.reason) == ("error", True)
    file.chmod(0o600)
    data = file.read_bytes()
    file.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    found = brought(options)
    assert (found.result, "header is damaged" in found.reason) == ("corrupt", True)
    assert left(options) == [], "the next start fetches it again"
    assert brought(options).result == "hit"
    os.truncate(file, 4096)
    assert brought(options).bytes_fetched == len(data), "it is fetched again"


def test_a_folder_store_has_models_too(shop: Shop, tmp_path: Path) -> None:
    """Built there, and then there is no S3 but for the list of the checkpoint."""
    builder = replace(shop.options, store=StoreOptions(str(tmp_path / "folder")))
    checkpoint = read_checkpoint(builder)
    plan = make_plan(checkpoint.config, builder)
    assert prepare_weights(checkpoint.folder, plan, builder.store_folder, thorough=False).result == "written"
    assert publish_weights(checkpoint, plan, builder).result == "published"
    server = replace(builder, model=replace(builder.model, cache_dir=tmp_path / "nothing"))
    assert may_be_published(server)
    found = brought(server)
    assert (found.result, found.bytes_fetched) == ("hit", 0), found.reason
    # Copied from elsewhere it is signed by nobody who is trusted.
    copy = shutil.copytree(
        tmp_path / "folder", tmp_path / "copy", ignore=shutil.ignore_patterns("weights", "built")
    )
    keyed = StoreOptions(str(copy), shop.options.store.trusted_keys)
    assert brought(replace(server, store=keyed)).result == "untrusted"
