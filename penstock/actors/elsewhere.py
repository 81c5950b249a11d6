"""Finds processes of a job that Ray has started."""

from __future__ import annotations

from typing import Any

import ray

from penstock.runtime.host.hangs import Process


def process_of(pid: int, node: str, actor: Any) -> Process:
    """Returns the process of an actor that lives on this Ray node. On another node, only Ray can kill it."""
    if node == ray.get_runtime_context().get_node_id():
        return Process(pid)
    return Process(pid, lambda: ray.kill(actor, no_restart=False))
