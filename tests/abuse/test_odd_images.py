"""Bodies that are no picture, or a strange one: 422 with a reason, or a caption; and nothing is left of them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.attacks.abuse import Abused
from support.attacks.hostile_images import read, refused


@pytest.fixture(scope="module")
def bad() -> dict[str, bytes]:
    return refused()


@pytest.fixture(scope="module")
def odd() -> dict[str, bytes]:
    return read()


def test_what_is_no_picture(abused: Abused, bad: dict[str, bytes]) -> None:
    """Whatever it says it is: neither the type nor the name of a file is believed."""
    types = ("image/png", "image/svg+xml", "application/octet-stream", "image/jpeg; charset=utf-8")

    def attack() -> None:
        for name, data in bad.items():
            for kind in types:
                status, problem, _ = abused.server.call("/v1/caption", data, {"Content-Type": kind})
                assert status in (413, 422), (name, kind, problem)
                assert "/etc/passwd" not in str(problem)

    abused.withstands(attack)


def test_what_is_an_odd_one(abused: Abused, odd: dict[str, bytes]) -> None:
    def attack() -> None:
        for name, data in odd.items():
            for _ in range(3):
                status, reply, _ = abused.server.call("/v1/caption", data)
                assert status in (200, 413, 422), (name, reply)
                assert status != 200 or isinstance(reply["caption"], str)

    abused.withstands(attack)


def test_all_at_once(abused: Abused, bad: dict[str, bytes], odd: dict[str, bytes]) -> None:
    """Good pictures among them get the right captions."""

    def ask(data: bytes) -> tuple[int, Any]:
        status, reply, _ = abused.server.call("/v1/caption", data)
        return status, reply

    def attack() -> None:
        pictures = {path.read_bytes(): caption for path, caption in abused.samples.items()}
        mixed = [*bad.values(), *odd.values(), *pictures] * 2
        with ThreadPoolExecutor(12) as pool:
            for data, (status, reply) in zip(mixed, pool.map(ask, mixed), strict=True):
                assert status in (200, 413, 422), reply
                assert data not in pictures or reply["caption"] == pictures[data]

    abused.withstands(attack)
