"""Collects the problems that the compiler finds, with the step and the activity in which it finds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import Problem
from .source import Node


class Reports:
    """`activity` begins the message of every problem, as in the service: "error evaluating return value: …"."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self._step = ""
        self._activity = ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        outer, self._step = self._step, name
        yield
        self._step = outer

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        outer, self._activity = self._activity, text
        yield
        self._activity = outer

    def problem(self, message: str, node: Node, *, offset: int = 0, severity: str = "error") -> None:
        """Report a mistake at a node; `offset` is its column within the node."""
        message = f"{self._activity}: {message}" if self._activity else message
        self.problems.append(Problem(message, node.line, node.column + offset, self._step, severity))

    def step_problem(self, message: str, node: Node, step: str, severity: str = "error") -> None:
        """Report a mistake in a step by the step's name."""
        self.problems.append(Problem(message, node.line, node.column, step, severity))
