"""The choice of the transport between two machines."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from penstock.runtime.transport import choose as module
from penstock.runtime.transport import rdma
from penstock.runtime.transport.choose import Abilities, choose, probe

MLX = Abilities("mlx5_0 port 1", link="RoCE")
RXE = Abilities("rxe0 port 1", link="RoCE")
INFINIBAND = Abilities("mlx4_0 port 2", link="InfiniBand")
NONE = Abilities("", "10.0.0.7 has no RDMA: there is no device for RDMA on this machine")
OTHER = Abilities("", "10.0.0.8 has no RDMA: pyverbs cannot be loaded")


def test_rdma_is_chosen_when_both_have_it() -> None:
    assert choose(MLX, MLX).reason == "RDMA, because both machines have an active device (mlx5_0 port 1)."
    assert choose(MLX, RXE).kind == "rdma"
    assert choose(MLX, RXE).reason.endswith("(mlx5_0 port 1 and rxe0 port 1).")


def test_different_networks_do_not_speak_to_each_other() -> None:
    assert choose(MLX, INFINIBAND) == choose(INFINIBAND, MLX)
    assert choose(INFINIBAND, MLX).reason == "TCP, because mlx4_0 port 2 speaks InfiniBand, and mlx5_0 port 1 RoCE."
    assert choose(INFINIBAND, INFINIBAND).kind == "rdma"


def test_the_reason_says_what_is_missing_and_where() -> None:
    assert choose(MLX, NONE) == choose(NONE, MLX)
    assert choose(MLX, NONE).kind == "tcp"
    assert choose(MLX, NONE).reason == f"TCP, because {NONE.lacks}."


@pytest.mark.parametrize(("own", "other"), [*itertools.product((MLX, RXE, INFINIBAND, NONE, OTHER), repeat=2)])
def test_both_ends_choose_the_same(own: Abilities, other: Abilities) -> None:
    assert choose(own, other) == choose(other, own)


def test_tls_excludes_rdma() -> None:
    assert choose(MLX, MLX, tls=True).kind == "tcp"


def test_a_probe_says_what_is_missing() -> None:
    found = probe("127.0.0.1")
    # Where the tests run there may be a device, but none without the packages.
    assert found.rdma or found.lacks.startswith("127.0.0.1 has no RDMA: ")


def test_a_probe_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: str) -> rdma.Port:
        raise SystemError("the driver")

    monkeypatch.setattr(rdma, "find_port", broken)
    assert probe("10.0.0.7") == Abilities("", "10.0.0.7 has no RDMA: the driver")


def test_a_probe_does_not_wait_for_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "_look", lambda host: (release.wait(60), Abilities("late"))[1])
    begin = time.monotonic()
    found = probe("10.0.0.7", limit_s=0.05)
    assert found.lacks == "the devices of 10.0.0.7 have not answered within 0.05 s"
    release.set()
    assert time.monotonic() - begin < 60
