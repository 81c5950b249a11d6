"""Runs a command in guests: python -m tests.guests --guests 2 -- python3 -m tests.guests.hello"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.guests import packages
from tests.guests.guest import Guests


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guests", description=__doc__)
    parser.add_argument("--fetch", action="store_true", help="only download and unpack what guests are made of")
    parser.add_argument("--guests", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--jobs", action="store_true", help="guests can run jobs, and share a folder")
    parser.add_argument("--processors", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    try:
        packages.fetch()
        if options.fetch:
            return 0

        def say(number: int, line: str) -> None:
            print(f"[{number}] {line}" if options.guests > 1 else line, flush=True)

        commands = [options.command] * options.guests
        with tempfile.TemporaryDirectory(prefix="guests-") as folder:
            more = {"jobs": options.jobs, "shared": Path(folder) if options.jobs else None}
            ended = Guests(commands, processors=options.processors, line=say, **more).run(options.limit)
    except packages.Missing as error:
        print(error, file=sys.stderr)
        return 2
    for one in ended:
        if one.status is None:
            print(f"a guest ended before its command did:\n{one.console[-3000:]}", file=sys.stderr)
    return max(1 if one.status is None else one.status for one in ended)


if __name__ == "__main__":
    sys.exit(main())
