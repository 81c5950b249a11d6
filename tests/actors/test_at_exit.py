"""What holds when a program that has used Penstock ends."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import atexit
from ray._private import auto_init_hook
atexit.register(lambda: print("connects by itself:", auto_init_hook.enable_auto_connect))
import penstock.actors.cluster
print("connects by itself:", auto_init_hook.enable_auto_connect)
"""


def test_ray_is_not_connected_to_again_while_the_program_ends() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_AUTO_CONNECT"}
    command = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["connects by itself: True", "connects by itself: False"]
