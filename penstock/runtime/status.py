"""The status of a job: a tree of frozen structs. It is built on the job's host, travels to drivers as it is, and is
read by the progress line, the command and users. docs/status.md is made from the docstrings of these classes
(`make status`).

Every status has all fields, whatever the job has and however far it is: the defaults say that nothing is known, or that
the job has none of it. The names of fields have their unit (`_s`, `_ms`, `_bytes`, `_per_s`); a field without one is a
count, a share from 0 to 1, or a text. The structs must never refer to what only one process can hold.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Self


class Part(msgspec.Struct, frozen=True):
    """A part of a status. It can also be read by keys, as a mapping that cannot be changed."""

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self, self.__struct_fields__[self.__struct_encode_fields__.index(key)])
        except ValueError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.__struct_encode_fields__)

    def __len__(self) -> int:
        return len(self.__struct_fields__)

    def __contains__(self, key: object) -> bool:
        return key in self.__struct_encode_fields__

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == dict(other.items()) if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a dict, because some fields are lists

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default when there is no such key."""
        try:
            return self[key]
        except KeyError:
            return default

    def keys(self) -> KeysView[str]:
        """Returns the keys, in the order of the fields."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:
        """Returns the values, in the order of the fields."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:
        """Returns the keys with their values, in the order of the fields."""
        return ItemsView(self)

    def changed(self, **fields: Any) -> Self:
        """Returns the same part with other values of some fields."""
        return msgspec.structs.replace(self, **fields)

    def plain(self) -> dict[str, Any]:
        """Returns a dict of dicts, lists, texts, numbers and None, as JSON has them."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


Mapping.register(Part)


class Latency(Part, frozen=True):
    """The ages of records since they entered the job, when they had been processed. A batch counts with the age of its
    oldest record.

    `p50`: the median, in ms; None when no record was processed.
    `p99`: the age that one record of a hundred exceeds, in ms."""

    p50: float | None = None
    p99: float | None = None


class OperatorStatus(Part, frozen=True, kw_only=True):
    """An operator, with all its tasks. Operators that are fused into one chain share their queue, busy time and
    latency; `queued` and `waiting` stand at the first of them. A record that is held back waits for its own operator
    too, so the `waiting` of several operators must not be added up.

    `parallelism`: the number of its tasks.
    `records_in`: records received. A keyed aggregate counts the partial results that it gets, so it counts fewer than
        the operator before it has emitted.
    `records_out`: records emitted.
    `skipped`: records let go by the error policy ("skip" or "dead_letter"), with those that failed on the way to the
        operator, for example in the function of `key_by`; a failed call of `map_batches` counts all its records.
    `late`: of windows: what came after its window was closed ([units](flows.md#event-time-and-windows)).
    `in_per_s`: records received in a second, over the last half second or more.
    `out_per_s`: records emitted in a second.
    `queued`: records in the inboxes of its tasks.
    `waiting`: all records that wait for the operator: those of `queued`, those that its source has ready (its backlog),
        those that senders hold back because its inboxes are full, and what will become of the records that wait for
        such senders.
    `busy`: the share of the time in which its busiest task ran.
    `cpu`: the cores that its busiest task used, with the threads that its functions have started; less than `busy`
        where functions wait or cores are short.
    `latency_ms`: the ages of the records that it has processed in the last five to ten seconds."""

    parallelism: int = 0
    records_in: int = 0
    records_out: int = 0
    skipped: int = 0
    late: int = 0
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    queued: int = 0
    waiting: int = 0
    busy: float = 0.0
    cpu: float = 0.0
    latency_ms: Latency = Latency()


class TaskStatus(Part, frozen=True, kw_only=True):
    """A task, which runs the operators of a chain on its share of the records.

    `number`: its number in the plan.
    `name`: its name, with which `job.migrate` calls it.
    `worker`: the worker that it runs in; None until it has one.
    `finished`: whether it has ended.
    `blocked`: whether the tasks after it take no more, so that it stands still.
    `queued`: records in its inbox.
    `unsent`: records that it has made and not sent yet.
    `busy`: the share of the time in which its steps run.
    `cpu`: the cores that it uses, with the threads that its functions have started.
    `records_in`: records that its first operator has received.
    `records_out`: records that its last operator has emitted."""

    number: int
    name: str
    worker: int | None = None
    finished: bool = False
    blocked: bool = False
    queued: int = 0
    unsent: int = 0
    busy: float = 0.0
    cpu: float = 0.0
    records_in: int = 0
    records_out: int = 0


class TreeLoad(Part, frozen=True, kw_only=True):
    """The load on which the limit of a tree depends. Rates and times are None until they are measured.

    `overrun_s`: by how much changes of the tree took longer, in all, than the queue had room for when they began.
    `reason`: why the limit is what it is.
    `overloaded`: whether the root cannot keep up with any tree, so that its sources wait.
    `rate`: entries a second.
    `copy_us`: the processor time of an entry for each child.
    `encode_us`: the processor time of encoding an entry.
    `other_us`: the processor time of all other work of the worker's thread for each entry.
    `busy`: the part of the last half second or more in which the thread was not idle."""

    overrun_s: float = 0.0
    reason: str = ""
    overloaded: bool = False
    rate: float | None = None
    copy_us: float | None = None
    encode_us: float | None = None
    other_us: float | None = None
    busy: float | None = None


class StreamStatus(Part, frozen=True, kw_only=True):
    """A stream through relays: the records that one task sends to all tasks of an operator.

    `stream`: the number of the stream among those of the worker's process.
    `tree`: the children of each node of the multicast tree. The root is given by the number of its worker; relays have
        higher numbers, those of `relays`: from 1048576 on, and from a far higher one in a job that has begun again, so
        that no number is ever used twice.
    `no_tree`: why the stream has no tree, so that its records go straight to the workers; empty when it has one.
    `limit`: to how many relays a node of the tree sends at most.
    `members`: how many of the receiving tasks get the stream through the tree.
    `channels`: how many tasks of other workers receive the stream at all.
    `switching`: whether the tree is changing.
    `switches`: how often the tree has changed.
    `last_switch_ms`: how long the last change took.
    `undelivered`: entries that are kept, because not all workers have them yet.
    `entries`: how many entries the stream has had.
    `bytes`: the bytes of these entries.
    `encodings`: how often batches were encoded.
    `encoding_ms`: how long this took in all.
    `load`: the load on which the limit depends."""

    stream: int
    tree: dict[int, list[int]]
    no_tree: str
    limit: int
    members: int
    channels: int
    switching: bool
    switches: int
    last_switch_ms: float
    undelivered: int
    entries: int
    bytes: int
    encodings: int
    encoding_ms: float
    load: TreeLoad


class WorkerStatus(Part, frozen=True, kw_only=True):
    """A worker of the job. The counters of a silent worker are those that it reported last.

    `index`: the number of the worker.
    `pid`: the process id of its last process.
    `state`: RUNNING while this process runs, STARTING while another one is started in its place, and NONE in between.
    `node_id`: Ray's id of the node that it runs on.
    `tasks`: the numbers of the tasks that run in it.
    `queued`: records in the inboxes of its tasks.
    `ring_bytes`: the size of its ring for messages from the same node.
    `transports`: for each other worker, a sentence about the transport that carries its messages, and the reason;
        empty where there was no choice.
    `sent_bytes`: the bytes that it has sent over the network to each other worker and each relay.
    `streams`: what it sends through relays.
    `cpu`: the cores that its own thread uses.
    `cpu_wait`: the part of the time in which its thread waits for a core.
    `cpu_threads`: the cores that threads of the job's functions use.
    `silent_s`: for how long it has not answered when it was asked for this status; 0 when it has answered."""

    index: int
    pid: int
    state: str
    node_id: str
    tasks: list[int] = []
    queued: int = 0
    ring_bytes: int = 0
    transports: dict[int, str] = {}
    sent_bytes: dict[int, int] = {}
    streams: list[StreamStatus] = []
    cpu: float = 0.0
    cpu_wait: float = 0.0
    cpu_threads: float = 0.0
    silent_s: float = 0.0


class RelayStatus(Part, frozen=True, kw_only=True):
    """A relay, which takes records for all workers of its machine ([relays](cluster.md#relays)).

    `number`: its number.
    `node_id`: the node that it runs on.
    `state`: "starting", "ready", or "lost" while it is replaced.
    `pid`: its process id; None until it is known.
    `streams`: how many streams come through it.
    `kept_bytes`: the bytes of the entries that it keeps, because not all receivers have them yet.
    `behind`: entries that wait for room in a worker's ring.
    `forwarded`: entries that it has sent to other relays.
    `handed_over`: entries that it has given to workers."""

    number: int
    node_id: str = ""
    state: str = "starting"
    pid: int | None = None
    streams: int = 0
    kept_bytes: int = 0
    behind: int = 0
    forwarded: int = 0
    handed_over: int = 0


class LinkStatus(Part, frozen=True, kw_only=True):
    """A link between two workers that is silent.

    `from`: the worker that tells of it.
    `to`: its peer.
    `at`: where the peer listens.
    `machines`: the names of the machines of both.
    `silent_s`: for how long the peer has not answered.
    `worked`: whether the link has ever worked."""

    from_: int = msgspec.field(name="from")
    to: int
    at: str
    machines: list[str]
    silent_s: float
    worked: bool


class EpochsStatus(Part, frozen=True, kw_only=True):
    """The epochs of a job. Without epochs, the fields stay zeros and None.

    `complete`: the last complete epoch; 0 means none yet.
    `begun`: the last epoch that has begun; 0 means none yet.
    `age_s`: the seconds since the last epoch was completed; None when it was completed before the whole job restarted.
    `restarts`: the number of recoveries since the job or its JobMaster was started.
    `last_failure`: why the last epoch did not complete: the tasks that have not answered, or the store's error; None
        again after the next complete epoch.
    `damage`: the file of the checkpoint store that was last found missing or damaged, and what was done about it; None
        when none was found since the JobMaster was started.
    `store`: the place of the checkpoint store; None in a job without epochs."""

    complete: int = 0
    begun: int = 0
    age_s: float | None = None
    restarts: int = 0
    last_failure: str | None = None
    damage: str | None = None
    store: str | None = None


class NodeStatus(Part, frozen=True, kw_only=True):
    """A node of the job.

    `name`: its name.
    `workers`: how many workers it has.
    `speed`: how fast its cores are, relative to those of the others."""

    name: str
    workers: int
    speed: float = 1.0


class MachineStatus(Part, frozen=True, kw_only=True):
    """A machine of the job but the JobMaster's own, by its heartbeats.

    `node_id`: Ray's id of the node.
    `name`: its name.
    `state`: "ok", "slow", "silent" or "lost".
    `silent_s`: for how long it has been silent.
    `round_trip_ms`: how long a heartbeat takes.
    `clock_ahead_ms`: how far its clock is ahead of the JobMaster's; None until it is measured.
    `clock_uncertainty_ms`: by how much this may be wrong."""

    node_id: str = ""
    name: str
    state: str
    silent_s: float = 0.0
    round_trip_ms: float = 0.0
    clock_ahead_ms: float | None = None
    clock_uncertainty_ms: float | None = None


class PlacementStatus(Part, frozen=True, kw_only=True):
    """The places of tasks, and the measurements of placement. Traffic is in bytes a second with 100 more for each
    record and the cost of messages, as plans count it. What is not measured yet is None, as is all traffic without
    `replan_s`.

    `method`: the method of placement; None for a local job.
    `nodes`: the nodes of the job; empty for a job on the machine of its driver.
    `node_ids`: Ray's ids of the nodes, in the same order.
    `moves`: the number of tasks that have moved since the job started.
    `last`: the last decision in words, until the next one replaces it.
    `node_cost`: how much a hop between nodes costs more than one between workers of a node.
    `hop_ns_per_kib`: the processor time of each KiB in a hop inside a "worker", a "node", and over the "network".
    `hop_ns_per_message`: the processor time of each message in such a hop.
    `hop_us`: how many microseconds such a hop takes.
    `between_nodes`: the traffic between nodes.
    `between_workers`: the traffic between workers, where a broadcast counts once for each worker.
    `total`: the traffic between all tasks, where a broadcast counts once for each task.
    `intra_node_share`: the part of the traffic between workers that stays on its node.
    `machines`: the other machines of the job."""

    method: str | None = None
    nodes: list[NodeStatus] = []
    node_ids: list[str] = []
    moves: int = 0
    last: str | None = None
    node_cost: float | None = None
    hop_ns_per_kib: dict[str, float | None] | None = None
    hop_ns_per_message: dict[str, float | None] | None = None
    hop_us: dict[str, float | None] | None = None
    between_nodes: float | None = None
    between_workers: float | None = None
    total: float | None = None
    intra_node_share: float | None = None
    machines: list[MachineStatus] = []


class SparkProcesses(Part, frozen=True):
    """The processes of Spark.

    `bridge`: the process that holds the session; None without one.
    `executors`: the process of each executor by its id, as far as it is known."""

    bridge: int | None = None
    executors: dict[str, int | None] = {}


class RangeFigures(Part, frozen=True):
    """The figures from which a range's paradigm was decided, in records, records a second and seconds. None is what is
    not known.

    `queue`: the records that wait before the range.
    `arrival_rate`: how many records come a second.
    `held_up`: how many of the queue wait only because operators further down take no more.
    `record_rate`: the record tasks' speed as the job runs.
    `record_rate_alone`: what the record tasks could do if nothing else held them up.
    `record_rate_shown`: the most that the record tasks have processed in a second lately.
    `operation_rate`: Spark's speed without the fixed cost of a micro-batch.
    `operation_capacity`: Spark's speed with this cost, at the longest interval.
    `fixed_s`: the fixed cost of a micro-batch.
    `schedule_s`: the part of the fixed cost in Spark.
    `transmit_s`: the part of the fixed cost on the way there and back.
    `transmit_rate`: how many records a second this way carries.
    `record_transmit_s`: how long results are on their way to the next operators.
    `prepare_s`: what making Spark ready took the last time; before the first time, 12 s are assumed.
    `switch_s`: the time from the decision until all tasks gave their input to Spark, the last time; 1 s at first.
    `return_s`: the time from the decision until all tasks processed records again, the last time; 1 s at first.
    `interval_s`: for how long a micro-batch gathers.
    `queue_switch`: the queue length from which on Spark answers sooner.
    `queue_up`: the queue length at which the range goes to Spark.
    `queue_down`: the queue length at which the range comes back.
    `queue_soon`: what the queue will be when Spark could give its first answer, if it grows.
    `growth`: by how many records a second the queue has grown in the last moments.
    `full`: whether the buffers of the source have been full for two seconds, so that more records wait than `queue`
        says; this counts as a burst.
    `operation_measured`: whether Spark's figures were measured, by a trial or by micro-batches; otherwise they are
        assumed."""

    queue: float = 0.0  # L
    arrival_rate: float = 0.0  # V
    held_up: float = 0.0
    record_rate: float | None = None  # PD
    record_rate_alone: float | None = None
    record_rate_shown: float = 0.0
    operation_rate: float | None = None  # PO
    operation_capacity: float | None = None
    fixed_s: float | None = None  # t_s + t_ot
    schedule_s: float | None = None  # t_s
    transmit_s: float | None = None  # t_ot, of a micro-batch of hardly any records
    transmit_rate: float | None = None
    record_transmit_s: float | None = None  # t_dt
    prepare_s: float | None = None
    switch_s: float | None = None
    return_s: float | None = None
    interval_s: float | None = None  # T
    queue_switch: float | None = None  # L_switch
    queue_up: float | None = None  # L_up
    queue_down: float | None = None  # L_down
    queue_soon: float | None = None
    growth: float = 0.0
    full: bool = False
    operation_measured: bool = False


class SwitchMeasured(Part, frozen=True):
    """The outcome of a switch, as measured.

    `seconds`: for how long it was measured.
    `latency_s`: for how long a record has waited on average in this time."""

    seconds: float
    latency_s: float


class SwitchPeak(Part, frozen=True):
    """The peak of the queue that a switch itself made.

    `queue`: the most records that waited.
    `height_s`: how much longer than at the decision a record waited by that.
    `seconds`: for how many seconds more waited than at the decision."""

    queue: float
    height_s: float
    seconds: float


class SwitchStatus(Part, frozen=True, kw_only=True):
    """A switch of a range.

    `at_s`: when it was decided, on the clock of the JobMaster's machine that counts from its start
        (`time.monotonic()`), so that only differences tell something.
    `to`: "operation" (Spark) or "record".
    `reason`: why. When Spark became ready long after the burst was seen, it says what waited at both times.
    `arrival_rate`: how many records came a second then.
    `queue`: how many records waited then.
    `measured`: what came of it.
    `switched_s`: the seconds from the decision until the last task had switched; None until then.
    `answer_s`: the seconds from the decision until Spark's first answer; None until then.
    `peak`: what the switch itself did to the queue.
    `taken_back`: whether Spark has carried less than the record tasks would have, so that the range came back."""

    at_s: float
    to: str
    reason: str
    arrival_rate: float
    queue: float
    measured: SwitchMeasured
    switched_s: float | None
    answer_s: float | None
    peak: SwitchPeak
    taken_back: bool


class Refusal(Part, frozen=True):
    """The load at which a switch to Spark did not pay.

    `arrival_rate`: how many records came a second.
    `record_rate`: the record tasks' speed then.
    `since_s`: when this was, on the same clock as switches.
    `refused_for_s`: for how long no switch is made at this load.
    `why`: the reason why it did not pay."""

    arrival_rate: float
    record_rate: float
    since_s: float
    refused_for_s: float
    why: str


class RangeStatus(Part, frozen=True, kw_only=True):
    """A range of operators that can run in Spark.

    `chain`: the number of the chain at whose beginning the range is, as `explain()` shows it.
    `operators`: its operators. A range that begins in one chain and goes on in the next is listed for both: while it is
        in Spark as a whole, the operators of the later one are part of both, and records that they process in Spark
        count in both.
    `partials`: whether it ends in partial results of the keyed aggregate behind it.
    `extent`: why it ends at its last operator, once it has run in Spark.
    `state`: RECORD, PREPARING, SWITCHING, OPERATION or RETURNING ([states.md](states.md)).
    `paradigm`: where it runs now: "operation" (in Spark) or "record".
    `burst`: whether there is a burst at the range, whatever can be done about it: more records wait than Spark would
        answer sooner, or more come than the record tasks process and the queue grows; also while the range goes to
        Spark or is there, in every mode.
    `reason`: why it runs there; while there is no Spark, it says so.
    `figures`: what the decision was made from.
    `switches`: the last ten switches, and what came of each.
    `did_not_pay`: the load at which a switch to Spark did not pay, and for how long it is refused.
    `records_in_spark`: the number of records that Spark has processed.
    `unprocessed`: the number of records that failed in Spark, and that the tasks have processed.
    `failed`: why the tasks had to process a micro-batch, or some of its records, the last time.
    `way`: how it runs in Spark, and what a micro-batch costs in each way that was tried."""

    chain: int
    operators: list[str]
    partials: bool
    extent: str
    state: str
    paradigm: str
    burst: bool
    reason: str
    figures: RangeFigures
    switches: list[SwitchStatus]
    did_not_pay: list[Refusal]
    records_in_spark: int
    unprocessed: int
    failed: str | None
    way: str | None


class DualStatus(Part, frozen=True, kw_only=True):
    """The paradigms of a job with `dual`: which ranges of operators run in Spark, and why.

    `mode`: auto, off, spark-only or toggle; None in a job without `dual`.
    `spark`: the Spark session; or for how long it has been starting and ranges have been tried in it; or why there is
        none; None as long as nobody has asked for it.
    `spark_state`: ABSENT, PREPARING (being started, and tried), READY, DOUBTED (asked whether it lives) or STOPPED
        ([states.md](states.md)). A burst that you make yourself should wait for READY.
    `processes`: the processes of Spark.
    `ranges`: the ranges. They are there only when the job has answered.
    `stays`: the chains of which no operator can run in Spark, and why."""

    mode: str | None = None
    spark: str | None = None
    spark_state: str | None = None
    processes: SparkProcesses = SparkProcesses()
    ranges: list[RangeStatus] = []
    stays: dict[str, str] = {}


class StallStatus(Part, frozen=True):
    """A step of a source or sink that waits for an outside system.

    `what`: the step, and its operator.
    `for_s`: for how long it has failed, or has not returned.
    `limit_s`: for how long it is tried again before its error ends the job; 0.0 of a step that has not failed.
    `error`: its last error, if it has failed.
    `worker`: the number of its worker."""

    what: str
    for_s: float
    limit_s: float = 0.0
    error: str | None = None
    worker: int = -1


class JobStatus(Part, frozen=True, kw_only=True):
    """The status of a job.

    `name`: the name of the job.
    `state`: STARTING, RUNNING, RECOVERING, MOVING, STOPPING, FINISHED, CANCELLED or FAILED; STALLED when it would run,
        but a source or sink waits for an outside system (`stalled`); UNKNOWN of a job that another program has started,
        as long as its JobMaster has not answered this one.
    `error`: why the job has failed.
    `waits_for`: what a job that starts waits for. Later it is None, unless an operator's `open()` (or constructor) or
        `close()` has not returned for ten seconds, or the job is stalled. Only `job.cancel()` ends a job whose
        `close()` never returns.
    `stalled`: steps of sources and sinks that fail and are tried again, or that take long; the longest first.
    `started_ms`: when the job started, in ms since 1970.
    `uptime_s`: for how long the job has been there.
    `running_s`: for how long all its workers have been started.
    `master_silent_s`: for how long the JobMaster has not answered this program; the rest is then its last answer.
    `operators`: the operators by their names.
    `tasks`: the tasks, in the order of their numbers.
    `workers`: the workers, in the order of their numbers.
    `relays`: the relays of the job.
    `links`: the links between workers that are silent.
    `spares`: the number of spare processes that are ready.
    `epochs`: the epochs of the job.
    `placement`: where tasks run, and what placement has measured.
    `dual`: which ranges of operators run in Spark, and why.
    `records_read`: records that the sources have read.
    `records_written`: records that the sinks have received.
    `read_per_s`: records read in a second.
    `skipped`: the sum of the `skipped` of all operators.
    `late_dropped`: the `late` of each operator whose side output "late" the flow does not use; at the end of a job
        `wait()` warns of them.
    `mixing`: for each `watermark` that reads from an exchange that mixes the order of records, these exchanges.
    `latency_ms`: the ages of the records that the sinks have received in the last five to ten seconds.
    `latency_all_ms`: the same since the start.
    `cluster`: the address of the job's cluster, in the list of `penstock.jobs`; None elsewhere."""

    name: str
    state: str
    error: str | None = None
    waits_for: str | None = None
    stalled: list[StallStatus] = []
    started_ms: int = 0
    uptime_s: float = 0.0
    running_s: float = 0.0
    master_silent_s: float = 0.0
    operators: dict[str, OperatorStatus] = {}
    tasks: list[TaskStatus] = []
    workers: list[WorkerStatus] = []
    relays: list[RelayStatus] = []
    links: list[LinkStatus] = []
    spares: int = 0
    epochs: EpochsStatus = EpochsStatus()
    placement: PlacementStatus = PlacementStatus()
    dual: DualStatus = DualStatus()
    records_read: int = 0
    records_written: int = 0
    read_per_s: float = 0.0
    skipped: int = 0
    late_dropped: dict[str, int] = {}
    mixing: dict[str, list[str]] = {}
    latency_ms: Latency = Latency()
    latency_all_ms: Latency = Latency()
    cluster: str | None = None
