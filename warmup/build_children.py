"""The children of a build: all of them can be ended at once, and one that died is started again."""

import threading
from collections.abc import Mapping
from typing import Any

from warmup.child import Child, ChildError


class Children:
    """All children of a build, so that it can be stopped."""

    def __init__(self, job: Mapping[str, Any], nice: int) -> None:
        self._job = job
        self._nice = nice
        self._lock = threading.Lock()
        self._running: set[Child] = set()

    def start(self, module: str, environment: Mapping[str, str]) -> Child:
        child = Child(module, self._job, environment, self._nice)
        with self._lock:
            self._running.add(child)
        child.start()
        return child

    def end(self, child: Child) -> None:
        child.kill()
        with self._lock:
            self._running.discard(child)

    def kill(self) -> None:
        with self._lock:
            children = list(self._running)
        for child in children:
            child.kill()


class ReplaceableChild:
    """A child that is started when it is first asked, and again after it has died."""

    def __init__(self, children: Children, module: str, environment: Mapping[str, str]) -> None:
        self._children = children
        self._module = module
        self._environment = environment
        self._child: Child | None = None

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._child = self._children.start(self._module, self._environment)
        try:
            return self._child.ask(task)
        except ChildError:
            if not self._child.alive:
                self.close()
            raise

    def close(self) -> None:
        if self._child is not None:
            self._children.end(self._child)
            self._child = None
