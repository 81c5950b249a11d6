"""Workers note when messages are sent and when they have come."""

from __future__ import annotations

import penstock as ps
from penstock.placement.hop_latencies import HopLatencies
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.hop_meter import EVERY
from penstock.runtime.transport.hop_times import NOT_NOTED, HopTimes
from penstock.runtime.transport.shm import ShmTransport
from penstock.runtime.worker.run_loop import RunLoop
from tests.runtime.timed_job import Job

MS = 1_000_000


def hop(_: object) -> ps.Flow:
    flow = ps.Flow("hop", parallelism=1)
    numbers = flow.read(ps.sources.Generator(int, rate=10.0), name="numbers")
    numbers.rebalance().map(str, name="text").write(ps.sinks.Null(), name="out")
    return flow


def run(loop: RunLoop) -> None:
    loop.deliver(loop.transport.receive(0))
    for task in loop.tasks:
        while task.runnable():
            task.step()


def test_a_hop_between_workers_takes_until_the_message_lies_in_the_inbox() -> None:
    job = Job(hop, 2)
    for loop in job.loops:
        assert loop.transport.times is None, "nobody has asked"
        loop.transport.measure()
        loop.transport.times = HopTimes(lambda: job.now)
    sender, receiver = job.loops
    for due in range(1, 16 * 20):
        job.now = 10**9 + due * 10**8
        run(sender)
        job.now += 7 * MS
        run(receiver)
    reports = [loop.transport.times.report(worker) for worker, loop in enumerate(job.loops) if loop.transport.times]
    assert len(reports[0].sent) >= 10
    assert not any(number & NOT_NOTED for _, _, number, _ in reports[0].sent)
    assert HopLatencies.of(reports, [0, 0]) == HopLatencies(None, 7e-3, None)
    assert HopLatencies.of(reports, [0, 1]) == HopLatencies(None, None, 7e-3)


def test_a_hop_inside_a_worker_is_noted_too() -> None:
    job = Job(hop, 1)
    (loop,) = job.loops
    loop.transport.times = HopTimes(lambda: job.now)
    (target,) = [task.input for task in loop.tasks if not task.input.is_read]
    receive = target.receive

    def slow(*arguments: object) -> None:
        job.now += 3_000
        receive(*arguments)  # type: ignore[arg-type]

    target.receive = slow  # type: ignore[method-assign, assignment]
    for due in range(1, 16 * 20):
        job.now = 10**9 + due * 10**8
        run(loop)
    report = loop.transport.times.report(0)
    assert not report.sent
    assert HopLatencies.of([report], [0]).worker == 3e-6


def test_what_hops_cost_is_measured_in_shared_memory_from_when_it_is_asked_for() -> None:
    """What a worker does that waits for a message does not count, because it polls."""
    one, other = ShmTransport(0, 1 << 16), ShmTransport(1, 1 << 16)
    try:
        for transport, peer, worker in ((one, other, 1), (other, one, 0)):
            transport.connect({worker: peer.address})

        def send_all(waits: bool) -> None:
            for _ in range(3 * EVERY):
                assert one.send(1, 7, (bytes(1_000),))
                assert other.receive(60 if waits else 0)

        send_all(waits=False)
        assert one.meter is other.meter is None
        transports: list[Transport] = [one, other]
        for transport in transports:
            transport.measure()
        meters = [one.meter, other.meter]
        send_all(waits=True)
        assert [meter.report() for meter in meters if meter][1] == []
        send_all(waits=False)
        for transport in transports:
            transport.measure()
        assert [one.meter, other.meter] == meters, "once"
        assert one.meter is not None
        assert other.meter is not None
        ((sent, *_, ns),) = one.meter.report()
        ((received, digits, messages, size, _),) = other.meter.report()
        assert (sent, received) == ("send near", "receive near")
        assert (digits, messages, size) == (10, 3.0, 3_000.0)
        assert ns > 0
    finally:
        one.close()
        other.close()
