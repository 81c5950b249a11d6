"""The interface of placement for a JobHost: the Placer of a job on Ray has it, and LocalPlacing."""

from __future__ import annotations

from typing import Protocol

from penstock.runtime.program.plan import Plan


class Placing(Protocol):
    """Chooses the worker of each task (docs/papers.md: T10 to T12). The methods with a body do what fits a job of which
    nothing is measured, and for whose tasks nothing is reserved."""

    def first(self, plan: Plan) -> dict[int, int]:
        """The worker of each task of a job that starts, by task number."""
        ...

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        """The worker of each task of a plan that has changed; `before`: the workers of the tasks until now."""
        ...

    def stays(self, plan: Plan) -> dict[int, int]:
        """The worker of each task, by number, that must run in no other worker, because of the resources that it
        needs."""
        return {}

    def known(self) -> str:
        """The measured load and traffic of tasks, as text, for the next start of the job; may be empty."""
        return ""

    def moved(self, tasks: int) -> None:
        """A number of tasks have begun to run on another worker."""
        return

    def forget(self) -> None:
        """Tasks have changed, so their measurements do not count any more."""
        return
