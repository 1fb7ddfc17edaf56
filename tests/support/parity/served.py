"""Captions pictures through a server, each with each prompt, and compares them with what is expected."""

import threading
from pathlib import Path
from urllib.parse import quote

from support.parity.pictures import encoded, scene
from support.servers.server_process import ServerProcess

PROMPTS = ("", "a photography of", "The dog")
Captions = dict[tuple[Path, str], str]


def write_pictures(folder: Path) -> list[Path]:
    """Three, of other sizes."""
    paths = []
    for seed, size in enumerate(((200, 133), (96, 96), (50, 120))):
        paths.append(folder / f"{seed}.png")
        paths[-1].write_bytes(encoded(scene(*size, seed)))
    return paths


def assert_captions(server: ServerProcess, expected: Captions, backend: str) -> None:
    """Asserts that the server gives the expected captions, requested one at a time, then all at once."""
    replies: dict[tuple[Path, str], object] = {}

    def caption(path: Path, prompt: str) -> None:
        reply = server.caption(path, f"?prompt={quote(prompt)}" if prompt else "")
        assert reply["backend"] == backend
        replies[path, prompt] = reply["caption"]

    for path, prompt in expected:
        caption(path, prompt)
    assert replies == expected
    replies.clear()
    threads = [threading.Thread(target=caption, args=key) for key in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == expected
