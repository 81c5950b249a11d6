"""Shows that memory stays flat: python3 -m tests.guests.memory [MESSAGES], in each of two guests.

pyverbs has lost memory with each work request and each completion in some versions. So a million messages must leave
both processes as large as they were after the first ones.
"""

from __future__ import annotations

import os
import sys
import time

from tests.guests.torture import Other, meet

WARM = 20_000
#: What a million messages may add: less than five bytes each.
GROWTH_MAX = 4 * 1024 * 1024


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    own = int(os.environ["GUEST"])
    other = Other()
    other.patience(3600)
    peer = meet(own, other)
    sizes, begin = [], 0.0
    for number in (WARM, count):
        begin = time.monotonic()
        if own == 0:
            sizes.append(peer("flood", number))
            other.hear()
        else:
            peer("receive_all", number)
            sizes.append(peer("memory"))
            other.tell("all is there")
    growth = sizes[1] - sizes[0]
    took = time.monotonic() - begin
    end = "sender" if own == 0 else "receiver"
    print(f"{end}: {sizes[0]:,} bytes, {growth:+,} after {count:,} messages ({count / took:,.0f}/s)", flush=True)
    assert growth < GROWTH_MAX
    other.tell("done")
    other.hear()
    peer("close")


if __name__ == "__main__":
    main()
