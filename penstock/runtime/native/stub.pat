# For nanobind's stub generator (-p): the methods that are plain C, of which it cannot see the types.

Producer.try_write$:
    \from typing_extensions import Buffer as Buffer
    def try_write(self, target: int, payload: Buffer, /) -> bool:
        \doc

Producer.write$:
    \from typing_extensions import Buffer as Buffer
    def write(self, target: int, payload: Buffer, /, timeout: float | None = None) -> None:
        \doc

stable_hash$:
    def stable_hash(key: object, /) -> int:
        \doc

key_groups$:
    def key_groups(keys: list[Any], n_groups: int, /) -> bytes:
        \doc

partition$:
    \from typing_extensions import Buffer as Buffer
    def partition(
        keys: list[Any], columns: tuple[list[Any], ...], table: Buffer, n_tasks: int, /
    ) -> list[tuple[list[Any], ...]]:
        \doc

pack$:
    def pack(records: list[Any], /) -> tuple[int, bytes] | None:
        \doc

pack_part$:
    def pack_part(records: list[Any], begin: int, end: int, /) -> tuple[int, bytes] | None:
        \doc

pack_frames$:
    def pack_frames(entries: dict[Any, Any], full: int, /) -> list[tuple[int, bytes]] | None:
        \doc

pack_value_frames$:
    def pack_value_frames(entries: dict[Any, Any], full: int, /) -> list[tuple[int, bytes]] | None:
        \doc
