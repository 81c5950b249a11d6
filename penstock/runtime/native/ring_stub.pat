# For nanobind's stub generator (-p): the methods that are plain C, of which it cannot see the types.

Producer.try_write$:
    \from typing_extensions import Buffer as Buffer
    def try_write(self, target: int, payload: Buffer, /) -> bool:
        \doc

Producer.write$:
    \from typing_extensions import Buffer as Buffer
    def write(self, target: int, payload: Buffer, /, timeout: float | None = None) -> None:
        \doc
