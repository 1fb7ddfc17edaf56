"""Starts the child processes of a build, replaces one that died, and ends all of them at once."""

import threading
from collections.abc import Mapping
from typing import Any

from snapcap.warmup.machine.child import Child, ChildError


class Children:
    """All children of a build, so that it can be stopped."""

    def __init__(self, job: Mapping[str, Any], nice: int, limit: float) -> None:
        """``limit``: seconds for one answer."""
        self._job = job
        self._nice = nice
        self.limit = limit
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self._stopped = False

    def start(self, module: str, environment: Mapping[str, str]) -> Child:
        """Raises ChildError, also when the build has been stopped, and OSError."""
        child = Child(module, self._job, environment, self._nice)
        with self._lock:
            if self._stopped:
                raise ChildError("the build was stopped")
            self._running.add(child)
        try:
            child.start(self.limit)  # one that was ended by now does not begin
        except BaseException:
            self.end(child)
            raise
        return child

    def end(self, child: Child) -> None:
        child.kill()
        with self._lock:
            self._running.discard(child)

    def stop(self) -> None:
        """End them all, and start no other."""
        with self._lock:
            self._stopped = True
            children = list(self._running)
        for child in children:
            child.kill()


class ReplaceableChild:
    """A child that is started when it is first asked, and again after it has died, until the block ends."""

    def __init__(self, children: Children, module: str, environment: Mapping[str, str]) -> None:
        self._children = children
        self._module = module
        self._environment = environment
        self._child: Child | None = None

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ChildError, OSError: as starting a child does, and asking it."""
        if self._child is None:
            self._child = self._children.start(self._module, self._environment)
        try:
            return self._child.ask(task, self._children.limit)
        except ChildError:
            if not self._child.alive:
                self.close()
            raise

    def __enter__(self) -> "ReplaceableChild":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; the next ``ask`` starts another."""
        if self._child is not None:
            self._children.end(self._child)
            self._child = None
