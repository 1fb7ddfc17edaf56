"""Makes tokens of prompts in a process of its own, whose time and memory are bounded.

A tokenizer is a program of its checkpoint: its normaliser may make a text a million times as long, a pattern of it
may take years at a text, and its library may panic. None of that can be stopped on a thread.

    job   {"folder": …, "chat": …}, then {"prompt": …, "most": …} for each
    reply {"ids": […]}, {"count": …} for more ids than `most`, or {"must": …, "cause": …} for a text that is refused

Run as ``python -m snapcap.service.captioning.prompt_worker``.
"""

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import PromptError, TokenizerFailed
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.text import ChatIds
from snapcap.warmup.machine.confined import confine
from snapcap.warmup.machine.memory import first_for_the_oom_killer
from snapcap.warmup.machine.tasks import Task, serve_tasks

# Whole seconds are what the kernel counts, so that a prompt has between these and one more.
CPU_SECONDS = 1
MEMORY = 256 << 20  # beyond that of the tokenizer


@dataclass(frozen=True)
class PromptJob:
    """The checkpoint folder, and the `ChatIds` of a model that takes instructions, as a record of JSON's values."""

    folder: Path
    chat: dict[str, Any] | None


def _start(job: PromptJob) -> Task:
    first_for_the_oom_killer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a text that ends this process leaves no file
    lists = {name: tuple(value) for name, value in (job.chat or {}).items() if isinstance(value, list)}
    chat = None if job.chat is None else ChatIds(**{**job.chat, **lists})
    tokenizer = Tokenizer.from_folder(job.folder, chat)
    with contextlib.suppress(ValueError, OSError):  # not Linux, or a lower limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    confine()

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _bound(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1)
        try:
            ids = tokenizer.prompt_ids(task["prompt"])
        except PromptError as error:
            return {"must": str(error), "cause": error.cause if isinstance(error, TokenizerFailed) else ""}
        return {"ids": ids} if len(ids) <= task["most"] else {"count": len(ids)}

    return answer


def _bound(limit: int, most: int) -> None:
    """The soft limit alone, which the next prompt may raise again."""
    _, hard = resource.getrlimit(limit)
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limit, or a lower one
        resource.setrlimit(limit, (most, hard))


if __name__ == "__main__":
    sys.exit(serve_tasks(PromptJob, _start))
