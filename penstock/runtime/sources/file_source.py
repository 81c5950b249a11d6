"""The common part of sources of files: the patterns of their paths, and the words that describe the source."""

from __future__ import annotations

from penstock.runtime.sources.base import Source, T_co
from penstock.runtime.sources.paths import Patterns, as_patterns


class FileSource(Source[T_co]):
    """A source that reads the files of some patterns."""

    def __init__(self, patterns: Patterns) -> None:
        self.patterns = as_patterns(patterns, type(self).__name__)

    def describe(self) -> str:
        options = ((name, getattr(self, name, None)) for name in ("columns", "filters"))
        shown = [*map(repr, self.patterns), *(f"{name}={value!r}" for name, value in options if value is not None)]
        return f"{type(self).__name__}({', '.join(shown)})"
