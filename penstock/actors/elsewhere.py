"""Processes of a job that Ray has started, on this node or on another one."""

from __future__ import annotations

from typing import Any

import ray

from penstock.runtime.host.hangs import Process


def process_of(pid: int, node: str, actor: Any) -> Process:
    """The process of an actor that lives on this Ray node; on another node only Ray can kill it."""
    if node == ray.get_runtime_context().get_node_id():
        return Process(pid)
    return Process(pid, lambda: ray.kill(actor, no_restart=False))
