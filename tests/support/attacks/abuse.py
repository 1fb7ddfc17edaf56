"""Attacks a real server, and measures /livez and its memory meanwhile and its capacity afterwards.

Bounds are of the server's own run: what /livez takes when nothing happens, what it holds before.

    def test_something(abused: Abused) -> None:
        abused.withstands(lambda: exchange(abused.port, b"..."))
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.attacks.full_capacity import full_capacity, wait_idle
from support.attacks.watching import ServerWatch, Window
from support.servers.server_process import ServerProcess

from snapcap.benchmarks.harness.processes import tree_memory

IDLE_S = 1.0
# A tenth of the least that is a stall; five times as often, the watch would take as much CPU as the server.
PROBE_S = 0.05
# An attack may cost what other requests cost, on a machine whose two CPUs do other things too.
FACTOR = 20.0
FLOOR_S = 0.5
MEMORY_SLACK = 96 << 20
RETURN_S = 20.0


@dataclass(frozen=True)
class Damage:
    """The effects of an attack: memory before and after in bytes, and the ``allowed`` delay of a probe in
    seconds."""

    window: Window
    allowed: float
    before: int
    after: int

    @property
    def stalled(self) -> bool:
        return self.window.failed > 0 or self.window.livez.worst > self.allowed

    def __str__(self) -> str:
        livez, control = self.window.livez, self.window.control
        return (
            f"/livez worst {livez.worst * 1000:.0f} ms, p99 {livez.p99 * 1000:.1f} ms of {livez.count}, "
            f"failed {self.window.failed}; allowed {self.allowed * 1000:.0f} ms; a server that does nothing: worst "
            f"{control.worst * 1000:.0f} ms; work stretched {self.window.stretch:.1f} times; "
            f"memory {self.before >> 20} MiB, peak {self.window.peak >> 20}, after {self.after >> 20}"
        )


class Abused:
    """A server that is ready, and the watch over it; a context manager. ``samples``: images and their captions."""

    def __init__(self, samples: Mapping[Path, str], *options: str) -> None:
        self.samples = samples
        self.server = ServerProcess("--queue-size", "16", *options)

    def __enter__(self) -> "Abused":
        self.server.__enter__()
        try:
            self.server.wait_ready()
            # Allocators keep what a first burst took; what an attack takes is counted from there.
            for _ in range(3):
                full_capacity(self.server, self.samples)
            self._watch = ServerWatch(self.port, self.server.process.pid, PROBE_S).__enter__()
            self.idle = self._watched(lambda: time.sleep(IDLE_S))
        except BaseException:
            self.server.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()
        self.server.__exit__()

    @property
    def port(self) -> int:
        return self.server.port

    def memory(self) -> int:
        """Bytes of all of the server's processes."""
        return tree_memory(self.server.process.pid)

    def _watched(self, attack: Callable[[], object]) -> Window:
        with self._watch.awake():
            began = time.monotonic()
            attack()
            return self._watch.window(began, time.monotonic())

    def withstands(self, attack: Callable[[], object], slack: int = MEMORY_SLACK) -> Damage:
        """Run an attack, print what it did (`pytest tests/abuse -rP`), and assert that /livez stayed under the
        bound, that no more than ``slack`` bytes of memory are gone, and that the server has its full capacity
        afterwards.

        The machine is not ours alone: where /livez was slow the attack is run once more, and what counts is the
        second time."""
        damage = self.suffer(attack, slack)
        if damage.stalled:
            damage = self.suffer(attack, slack)
        idle = self.idle.livez.p99
        print(f"/livez worst {damage.window.livez.worst / idle:.1f} × idle p99 of {idle * 1000:.1f} ms; {damage}")
        assert not damage.stalled, damage
        assert damage.after <= damage.before + slack, damage
        full_capacity(self.server, self.samples)
        return damage

    def suffer(self, attack: Callable[[], object], slack: int) -> Damage:
        """Run an attack, wait until the server has nothing to do, and until its memory is back."""
        before = self.memory()
        window = self._watched(attack)
        # The machine's part: what a server that does nothing took meanwhile, and work on CPUs that are shared.
        allowed = max(FACTOR * self.idle.livez.p99, FLOOR_S * window.stretch) + window.control.worst
        wait_idle(self.server)
        end = time.monotonic() + RETURN_S
        while (after := self.memory()) > before + slack and time.monotonic() < end:
            time.sleep(0.2)
        return Damage(window, allowed, before, after)
