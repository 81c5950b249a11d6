"""Keeps a job's notes (host/carry/notes.py), which outlive its JobMaster, with the head of the Ray cluster."""

from __future__ import annotations

from penstock.actors.cluster import NAMESPACE


class HeadMemory:
    """The key-value store of the head of the cluster that this process is connected to."""

    def get(self, key: str) -> bytes | None:
        from ray.experimental.internal_kv import _internal_kv_get  # noqa: PLC2701 - Ray has no public name for it

        found: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
        return found

    def put(self, key: str, value: bytes) -> None:
        from ray.experimental.internal_kv import _internal_kv_put  # noqa: PLC2701 - Ray has no public name for it

        _internal_kv_put(key, value, namespace=NAMESPACE)

    def delete(self, key: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_del  # noqa: PLC2701 - Ray has no public name for it

        _internal_kv_del(key, namespace=NAMESPACE)
