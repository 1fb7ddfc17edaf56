"""Reads the instructions of a Dockerfile, stage by stage."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """A stage, ``FROM base AS name``, with its instructions in order."""

    name: str
    base: str
    instructions: list[tuple[str, str]]

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]


@dataclass(frozen=True)
class Dockerfile:
    """``arguments``: what stands before the first stage, as ``NAME=default``."""

    stages: dict[str, Stage]
    arguments: list[str]

    @classmethod
    def read(cls, path: Path) -> "Dockerfile":
        lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        stages: dict[str, Stage] = {}
        arguments: list[str] = []
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            instruction, _, value = line.strip().partition(" ")
            if instruction == "FROM":
                base, _, name = value.partition(" AS ")
                current = stages.setdefault(name, Stage(name, base, []))
            elif not stages:
                arguments.append(value)
            else:
                current.instructions.append((instruction, value.strip()))
        return cls(stages, arguments)

    def inherited(self, target: str, instruction: str) -> list[str]:
        """The values of an instruction in a stage and in those it builds on, first to last."""
        stage = self.stages[target]
        base = self.inherited(stage.base, instruction) if stage.base in self.stages else []
        return base + stage.values(instruction)

    def environment(self, target: str) -> dict[str, str]:
        words = " ".join(self.inherited(target, "ENV")).split()
        return dict(word.split("=", 1) for word in words)
