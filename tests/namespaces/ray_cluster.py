"""A Ray cluster over hosts of the tests: one node a host, started as a user starts it (`ray start`).

How long Ray 2.60 takes to declare a node dead, as seen here: 29 s when a host ends and its kernel still closes the
connections, 63 s when it ends or is cut off without a word: five checks of 10 s with 3 s between them. With QUICK, 9 to
10 s in both cases. Ray's processes on a host that is cut off go on for longer than that.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.namespaces.hosts import Host, Hosts

PORT = 6379
#: Settings with which Ray notices soon that a host has gone.
QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
}
# Ray gives a node half a minute to start, which is not enough on a busy machine. How often it is started, and what Ray
# says then.
_STARTS = 3
_LATE = "timed out during startup"
_STORE_BYTES = 100 * 1024 * 1024


class RayCluster:
    """Ray on some hosts; host 0 is the head. It ends with the hosts."""

    def __init__(self, hosts: Hosts, cpus: int = 4, options: dict[str, str] | None = None) -> None:
        """Starts it. `cpus`: what each node says that it has, whatever the machine has. `options`: environment
        variables for Ray's own processes."""
        self._hosts = hosts
        self._cpus = cpus
        self._options = options or {}
        self.address = f"{hosts[0].address}:{PORT}"
        self._start(hosts[0], "--head", f"--port={PORT}", "--include-dashboard=false")
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(self.join, hosts[1:]))

    def join(self, host: Host) -> None:
        """Starts Ray on a host that has none, for example after a crash."""
        self._start(host, f"--address={self.address}")

    def _start(self, host: Host, *options: str) -> None:
        command = [
            "ray",
            "start",
            *options,
            f"--node-ip-address={host.address}",
            f"--num-cpus={self._cpus}",
            f"--object-store-memory={_STORE_BYTES}",
            "--disable-usage-stats",
        ]
        for left in reversed(range(_STARTS)):
            ran = host.run(command, env=self._options, limit_s=500.0, check=not left)
            if not ran.returncode:
                return
            assert _LATE in ran.stderr, f"{host.name}: {ran.stdout}\n{ran.stderr}"
            host.run(["ray", "stop", "--force"])

    @property
    def environment(self) -> dict[str, str]:
        """What a program on a host needs to join the cluster."""
        return {"RAY_ADDRESS": self.address}
