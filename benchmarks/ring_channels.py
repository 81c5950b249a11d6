"""ring_peers.py, which also runs by itself, as one of these benchmarks: its figures as cases."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.common import ROOT, Bench, scratch

_QUICK = "ring,zeromq ipc"


def run(bench: Bench) -> None:
    """See ring_peers.py."""
    with scratch() as folder:
        file = folder / "lines.jsonl"
        command = [sys.executable, "-m", "benchmarks.ring_peers", "--json", str(file)]
        if bench.runs < 5 or bench.quick:
            command += ["--quick"]
        if bench.quick:
            command += ["--only", _QUICK]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for text in file.read_text().splitlines():
            line = json.loads(text)
            bench.case(
                line["name"],
                line["figure"],
                line["unit"],
                peer=line["peer"],
                peer_figure=line["peer_figure"],
                note=f"{line['runs']} runs",
            )
