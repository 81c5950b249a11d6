"""Keeps a job's notes (host/carry/notes.py), which outlive its JobMaster, with the head of the Ray cluster."""

from __future__ import annotations

from ray.experimental import internal_kv

from penstock.actors.cluster import NAMESPACE


class HeadMemory:
    """The key-value store of the head of the cluster that this process is connected to."""

    def get(self, key: str) -> bytes | None:
        found: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        return found

    def __setitem__(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)

    def pop(self, key: str, default: None) -> None:
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)
