"""References to secrets, such as passwords, which connectors read where they need them.

A secret is named, and not carried: the flow, its pickle, the plan, the status and the log have the name only. It is
read in the process that connects. A password must never be in a message, nor in `repr()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.errors import FlowError, shorten


@dataclass(frozen=True)
class Secret:
    """A reference to a secret; made by `penstock.secret`."""

    reference: str | Callable[[], str]

    def read(self) -> str:
        """Returns the secret itself. Raises FlowError when it cannot be read here."""
        if not isinstance(self.reference, str):
            found = self.reference()
            if not isinstance(found, str):
                raise FlowError(f"{self}: the function returned a {type(found).__name__}; it must return a str")
            return found
        kind, _, name = self.reference.partition(":")
        if kind == "ENV":
            value = os.environ.get(name)
            if value is None:
                raise FlowError(f"{self}: the environment variable {name} is not set where it is needed; set it there")
            return value
        try:
            return Path(name).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise FlowError(f"{self}: the file cannot be read: {error.strerror}") from error

    def __str__(self) -> str:
        known = self.reference if isinstance(self.reference, str) else getattr(self.reference, "__name__", "a function")
        return f"secret({known!r})"

    __repr__ = __str__


def secret(reference: str | Callable[[], str]) -> Secret:
    """Names a secret for the settings of a connector. The secret is read in the process that connects.

    `reference`: "ENV:NAME" for an environment variable, "FILE:/path" for the text of a file without its last line end,
    or a function without arguments that returns the secret. Raises FlowError for anything else.

        ps.sources.Kafka("broker:9093", "orders", settings={"sasl.password": ps.secret("ENV:KAFKA_PASSWORD"), ...})
    """
    if callable(reference):
        return Secret(reference)
    if not isinstance(reference, str) or not reference.startswith(("ENV:", "FILE:")) or reference in ("ENV:", "FILE:"):
        raise FlowError(f"secret({shorten(reference)}): give 'ENV:NAME', 'FILE:/path', or a function that returns it")
    return Secret(reference)


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with each secret in them read."""
    return {name: value.read() if isinstance(value, Secret) else value for name, value in settings.items()}
