"""Fetches artifacts from S3 in a child process.

Importing boto3 is half a second of Python that would hold the lock which ``import torch`` needs; a child process
does it beside. The child brings the set to the local folder; the parent verifies it there again, and believes the
child nothing.

    stdin   {"request": …}, then {} to fetch
    stdout  {"result": …, "reason": …, …}

Run as ``python -m snapcap.warmup.store.fetch_worker``.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from snapcap.warmup.artifacts.key import Difference, Factors
from snapcap.warmup.artifacts.signing import KeyFileError, Trust
from snapcap.warmup.machine.child import Child, ChildError, ChildTimeoutError, Task, one_line, serve_lines
from snapcap.warmup.options import S3Options
from snapcap.warmup.store.fetch import Fetched, Result, fetch
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.open import open_store
from snapcap.warmup.store.store import StoreError

_GRACE = 3.0  # seconds for starting Python, and for the child to say itself that its time was over


@dataclass(frozen=True)
class FetchRequest:
    """All that a fetch needs, as it crosses to the child.

    store: ``s3://bucket/prefix``. local: the folder that the set is brought to.
    trusted_keys: files of public keys. deadline: seconds.
    """

    store: str
    local: Path
    key: str
    factors: Factors
    s3: S3Options
    trusted_keys: tuple[Path, ...] = ()
    allow_unsigned: bool = False
    deadline: float = 30.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "FetchRequest":
        """The reverse of ``to_json``, for what only we have written."""
        value: dict[str, Any] = json.loads(text)
        value["local"] = Path(value["local"])
        value["trusted_keys"] = tuple(map(Path, value["trusted_keys"]))
        value["s3"] = S3Options(**value["s3"])
        return cls(**value)


def fetch_in_child(request: FetchRequest, trust: Trust) -> Fetched:
    """``fetch`` with the remote's part in a child process, which is ended at the deadline.

    No child is started for what the local folder has. ``trust``: that of the request's keys.

    Raises:
        StoreRefusedError: the local folder cannot be used.
    """
    started = time.monotonic()
    local = FolderStore.open(request.local)
    found = _from_folder(request, local, trust)
    if found.result != "hit":
        told = _ask_child(request)
        # What the child says is a reason for a log; what can be run is only what the folder then verifies to.
        here = _from_folder(request, local, trust) if told.result == "hit" else told
        found = replace(here, reason=told.reason) if here.result == "hit" else here
        found = replace(found, bytes_fetched=told.bytes_fetched)
    return replace(found, seconds=time.monotonic() - started)


def _from_folder(request: FetchRequest, local: FolderStore, trust: Trust) -> Fetched:
    return fetch(None, local, request.key, request.factors, trust, request.deadline)


def _ask_child(request: FetchRequest) -> Fetched:
    end = time.monotonic() + request.deadline + _GRACE
    child = Child("snapcap.warmup.store.fetch_worker", {"request": request.to_json()})
    try:
        child.start(end - time.monotonic())
        return _parsed(child.ask({}, end - time.monotonic()))
    except ChildTimeoutError:
        return Fetched("error", f"fetching from {request.store} was ended after {request.deadline:g} s")
    except OSError as error:
        return Fetched("error", f"cannot start a process to fetch artifacts: {error.strerror}")
    except (ChildError, ValueError, TypeError, KeyError) as error:
        return Fetched("error", f"the process that fetches artifacts gave no answer: {one_line(error)}")
    finally:
        child.kill()


def _told(fetched: Fetched) -> dict[str, Any]:
    """What the parent wants to hear: no files, which it looks up by itself."""
    return {
        "result": fetched.result,
        "reason": fetched.reason,
        "bytes_fetched": fetched.bytes_fetched,
        "differences": [asdict(difference) for difference in fetched.differences],
    }


def _parsed(value: dict[str, Any]) -> Fetched:
    """The reverse of ``_told``."""
    if value["result"] not in get_args(Result):
        raise ValueError("not a result")
    return Fetched(
        result=cast("Result", value["result"]),
        reason=str(value["reason"]),
        bytes_fetched=int(value["bytes_fetched"]),
        differences=tuple(Difference(**difference) for difference in value["differences"]),
    )


def _fetch(request: FetchRequest) -> Fetched:
    try:
        trust = Trust.from_files(request.trusted_keys, request.allow_unsigned)
        remote = open_store(request.store, request.s3, trust)
        local = FolderStore.open(request.local)
    except (KeyFileError, StoreError) as error:
        return Fetched("error", str(error))
    return fetch(remote, local, request.key, request.factors, trust, request.deadline)


def _start(job: dict[str, Any]) -> Task:
    request = FetchRequest.from_json(job["request"])
    return lambda _task: _told(_fetch(request))


if __name__ == "__main__":
    sys.exit(serve_lines(_start))
