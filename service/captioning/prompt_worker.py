"""Tokenizes prompts in a separate process with bounded time and memory.

A tokenizer is a program that the checkpoint supplies. Its normaliser may make a text a million times longer, one
of its patterns may take years to match, and its library may panic. A thread could not be stopped in any of these
cases.

    job   {"folder": …, "chat": …}, then for each prompt
          {"prompt": …, "before": […], "after": […], "lead": …, "most": …, "most_ahead": …}
    reply {"ids": […], "ahead": …, "moved": …}, {"count": …} for more ids than `most`, or {"must": …, "cause": …}
          for a refused text

Run as ``python -m snapcap.service.captioning.prompt_worker``.
"""

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import PromptError, TokenizerFailed
from snapcap.models.json_object import from_json
from snapcap.models.processing.tokenizer import Tokenizer
from snapcap.models.text import ChatIds, Dialogue
from snapcap.warmup.machine.capacity import first_for_the_oom_killer
from snapcap.warmup.machine.confined import confine
from snapcap.warmup.machine.worker import Task, serve_tasks

# CPU seconds of a prompt. The kernel counts whole seconds, so a prompt gets between this number and one second
# more.
CPU_SECONDS = 1
# CPU seconds after which the process is renewed. A few seconds later the kernel ends it, because code of a prompt
# could go on for ever after its answer.
RENEWED_CPU_SECONDS = 60
# Bytes of address space for prompts, beyond what the process has after it has loaded the tokenizer.
MEMORY = 256 << 20


@dataclass(frozen=True)
class PromptJob:
    """Holds the checkpoint folder and, if the model takes instructions, the JSON text of its `ChatIds`."""

    folder: Path
    chat: str


def _start(job: PromptJob) -> Task:
    first_for_the_oom_killer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump of a process that a text ends
    tokenizer = Tokenizer.from_folder(job.folder, from_json(ChatIds, job.chat) if job.chat else None)
    with contextlib.suppress(ValueError, OSError):  # not Linux, or a lower limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with contextlib.suppress(ValueError, OSError):  # likewise
        most = _used() + RENEWED_CPU_SECONDS + 2 * (CPU_SECONDS + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    confine()

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        _bound(resource.RLIMIT_CPU, _used() + CPU_SECONDS + 1)
        try:
            before, after = (tuple((role, text) for role, text in task[name]) for name in ("before", "after"))
            around = Dialogue(before, after, task["lead"])
            found = tokenizer.prompt_ids(task["prompt"], around, task["most_ahead"])
        except PromptError as error:
            return {"must": str(error), "cause": error.cause if isinstance(error, TokenizerFailed) else ""}
        return found._asdict() if len(found.ids) <= task["most"] else {"count": len(found.ids)}

    return answer


def _used() -> int:
    """Returns the whole CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(used.ru_utime + used.ru_stime)


def _bound(limit: int, most: int) -> None:
    """Sets the soft limit only, so that it can be raised for the next prompt."""
    _, hard = resource.getrlimit(limit)
    with contextlib.suppress(ValueError, OSError):  # the system lacks this limit, or has a lower hard limit
        resource.setrlimit(limit, (most, hard))


if __name__ == "__main__":
    sys.exit(serve_tasks(PromptJob, _start))
