"""Downloads the servers that tests of connectors need: python -m tests.servers"""

from __future__ import annotations

import sys

from tests.servers import packages


def main() -> int:
    print(f"Apache Kafka: fetching its jars into {packages.PLACE} (54 MB, unless they are there)", flush=True)
    try:
        packages.fetch_kafka()
    except packages.Missing as error:
        print(error, file=sys.stderr)
        return 1
    print("Apache Kafka: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
