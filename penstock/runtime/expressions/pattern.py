"""Checks which regular expressions mean the same to Python and to Java, which runs them in Spark.

Allowed: characters, `.`, `[...]` with ranges, `\\d \\w \\s \\D \\W \\S` (ASCII), `\\t \\n \\r`, punctuation after a
backslash, `^` and `$`, `(...)`, `(?:...)`, `(?=...)`, `(?!...)`, `|`, and the quantifiers `* + ? {m} {m,} {m,n}`, also
lazy (`*?`). Both engines run it with `\\n` as the only end of a line and with ASCII classes.

Everything else (`\\b`, back references, named groups, look-behind, flags, `\\p{...}`, possessive quantifiers, `[[` and
`&&` in classes) is refused, as it differs between the two or between their versions. A pattern is never rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.runtime.errors import FlowError

FLAGS = re.ASCII
JAVA_FLAGS = "(?d)"  # UNIX_LINES: only \n ends a line, as in Python

_CLASSES = "dwsDWS"
_ESCAPES = "tnr"
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d{1,4}(?:,\d{0,4})?\})(?:\?)?")


def check_pattern(pattern: str) -> None:
    """Raises FlowError unless the pattern means the same in both."""
    i, start = 0, True  # start: nothing to repeat stands before
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            i, start = _escape(pattern, i), False
        elif c == "[":
            i, start = _class(pattern, i), False
        elif c == "(":
            i += 1
            if pattern.startswith("?", i):
                if pattern[i : i + 2] not in ("?:", "?=", "?!"):
                    raise _refused(pattern, i - 1, "of the groups that begin with (? only (?: (?= (?! are allowed")
                i += 2
            start = True
        elif c in "*+?{":
            found = _QUANTIFIER.match(pattern, i)
            if start or found is None:
                raise _refused(pattern, i, f"a quantifier needs something to repeat; write \\{c} for the character")
            i, start = found.end(), True  # nothing repeats a quantifier
        else:
            if c in "]}":
                raise _refused(pattern, i, f"write \\{c} for the character")
            i, start = i + 1, c in "^|"
            if c == "$" and _QUANTIFIER.match(pattern, i):
                raise _refused(pattern, i, "a quantifier needs something to repeat")
    try:
        re.compile(pattern, FLAGS)
    except (re.error, OverflowError, RecursionError) as error:
        raise FlowError(f"regexp_matches({pattern!r}): {error}") from None


def _escape(pattern: str, i: int) -> int:
    c = pattern[i + 1 : i + 2]
    if not c or c in _CLASSES + _ESCAPES or (c.isascii() and not c.isalnum() and c.isprintable()):
        return i + 2
    raise _refused(pattern, i, "this escape is not allowed")


def _class(pattern: str, i: int) -> int:
    begin = i
    i += 2 if pattern.startswith("[^", i) else 1
    first = i
    while i < len(pattern):
        c = pattern[i]
        if c == "]":
            if i == first:
                raise _refused(pattern, i, "write \\] for the character")
            return i + 1
        if c == "\\":
            i = _escape(pattern, i)
            continue
        if c in "[^" or pattern[i : i + 2] in ("&&", "--", "||", "~~"):
            raise _refused(pattern, i, f"write \\{c} for the character")
        if c == "-" and (i == first or pattern[i + 1 : i + 2] in ("]", "") or pattern[i - 2] == "\\"):
            raise _refused(pattern, i, "write \\- for the character")
        i += 1
    raise _refused(pattern, begin, "the class does not end")


def _refused(pattern: str, at: int, why: str) -> FlowError:
    return FlowError(
        f"regexp_matches({pattern!r}): at {pattern[at : at + 5]!r}, character {at}: {why}. "
        "Patterns are limited to what means the same in Python and in Java"
    )


def searcher(pattern: str) -> Callable[[str], object]:
    """Returns a function that returns a match somewhere in a text, or None."""
    return re.compile(pattern, FLAGS).search
