"""The cache folder of a user who has no home folder, and limits and files in memory where they are denied."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers.server_process import python

from snapcap.warmup import cache_folder
from snapcap.warmup.cache_folder import is_usable, user_cache
from snapcap.warmup.checkpoints.source import resolve_checkpoint
from snapcap.warmup.machine.denied import library_file, memory_file, process_limit, report_denied
from snapcap.warmup.options import S3Options


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    cache_folder._temporary.cache_clear()
    report_denied.cache_clear()
    return folder


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def own(temporary: Path) -> Path:
    return temporary / f"snapcap-{os.geteuid()}"


def test_a_user_without_a_home_has_a_folder_of_its_own(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache() == own(temporary)
    assert own(temporary).stat().st_mode & 0o777 == 0o700
    cache_folder._temporary.cache_clear()
    assert user_cache() == own(temporary), "which the next start finds again"


@pytest.mark.parametrize("home", ["/nonexistent/deeper", "/proc", "file"])
def test_a_home_that_cannot_be_written_is_none(
    home: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in ("/", "/proc"))
    assert user_cache() == own(temporary)


def test_a_home_that_can_be_written_is_used(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert user_cache() == tmp_path / "me" / ".cache" / "snapcap"
    assert list(temporary.iterdir()) == []


def test_a_read_only_cache_is_used_where_something_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not is_usable(tmp_path)
    (tmp_path / "store").mkdir()
    assert is_usable(tmp_path), "as an image of a container has it"


@pytest.mark.parametrize("kind", ["link", "file", "open", "of another user"])
def test_what_somebody_else_made_of_that_name_is_left_alone(
    kind: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    theirs, elsewhere = own(temporary), tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    match kind:
        case "link":
            theirs.symlink_to(elsewhere)
        case "file":
            theirs.touch()
        case "open":
            theirs.mkdir()
            theirs.chmod(0o777)
        case _:
            if os.geteuid():
                pytest.skip("ONLY ROOT CAN GIVE A FOLDER AWAY")
            theirs.mkdir(mode=0o700)
            os.chown(theirs, 12345, 12345)
    folder = user_cache()
    assert folder != theirs
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    assert user_cache() == folder, "the whole process uses one"
    assert list(elsewhere.iterdir()) == []


def test_a_start_says_once_that_its_cache_is_a_temporary_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    for cache in (user_cache(), user_cache(), temporary / "other"):
        resolve_checkpoint("demo", cache, S3Options())
    (line,) = caplog.messages
    assert line.startswith(
        f"the home folder is not available: {temporary}/snapcap-{os.geteuid()} is the cache folder"
    )
    assert "--cache-dir" in line


def test_the_hub_keeps_its_files_in_the_cache_where_there_is_no_home(temporary: Path) -> None:
    program = (
        "from snapcap.warmup.checkpoints import hub; import os\n"
        "hub._use_home(); from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    )
    done = python("-c", program, HOME="/nonexistent/me", TMPDIR=str(temporary))
    if os.geteuid():
        assert done.stdout.strip() == f"{temporary}/snapcap-{os.geteuid()}/huggingface/hub", done.stderr
    else:
        assert "huggingface/hub" in done.stdout, done.stderr


def test_a_file_in_memory_is_one_of_a_folder_where_the_kernel_denies_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", denied)
    for runs in (False, True):
        file = memory_file("name", runs=runs)
        os.write(file, b"content")
        assert Path(f"/proc/self/fd/{file}").read_bytes() == b"content"
        assert not os.get_inheritable(file)
        os.close(file)
    assert list(temporary.iterdir()) == [], "it has no name there"
    assert len(caplog.messages) == 1
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    monkeypatch.setattr("snapcap.warmup.machine.denied._OTHER_FOLDERS", ("/nonexistent",))
    with pytest.raises(OSError, match="no temporary folder can be used instead; set TMPDIR"):
        memory_file("name")


def test_a_library_for_which_there_is_no_room_leaves_no_file_open() -> None:
    """A start tries each package, and then goes on without the library: its memory would be kept for good."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # writes end there, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"), library_file(bytes(200_000)):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


def test_limits_that_the_system_does_not_tell_are_the_usual_ones(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(which: int) -> tuple[int, int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(resource, "getrlimit", denied)
    assert process_limit(resource.RLIMIT_NOFILE, 1024) == (1024, 1024)
    assert process_limit(resource.RLIMIT_AS) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_code_is_put_where_it_may_run(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine mounts `/tmp` with `noexec`, and its kernel allows no code in files in memory."""

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    real = os.statvfs
    allowed = tmp_path / "allowed"
    allowed.mkdir()

    def statvfs(folder: str) -> Any:
        flags = os.ST_NOEXEC if str(folder) == str(temporary) else 0
        return SimpleNamespace(f_flag=real(folder).f_flag | flags)

    monkeypatch.setattr(os, "memfd_create", denied)
    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr("snapcap.warmup.machine.denied._OTHER_FOLDERS", (str(allowed),))
    for runs, folder in ((True, allowed), (False, temporary)):
        file = memory_file("name", runs=runs)
        assert Path(os.readlink(f"/proc/self/fd/{file}")).parent == folder
        os.close(file)
