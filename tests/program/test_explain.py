"""What `flow.explain()` shows people."""

from __future__ import annotations

from penstock.bridge.forms import RangeForm, range_form
from penstock.runtime.operators.process import ProcessContext
from penstock.runtime.program.crossing import staying
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory

GOLDEN = """\
flow words

logical plan
  read     Memory(2 records)
  split    flat_map str.split  <- read
  write    Null()  <- split.dead_letters
  count    count, emits latest  <- split (key)
  audit    process note, side outputs rare  <- count (key)
  write_2  Null()  <- count
  write_3  Null()  <- audit
  write_4  Null()  <- audit.rare (all)

physical plan: 10 tasks on 2 workers
  [0] read > split  x1, 1 split
      -> [1] forward, from side output dead_letters, 1 channel
      -> [2] key, count combined before sending, 2 channels
  [1] write  x1
  [2] count  x2
      -> [3] key, 4 channels
      -> [4] forward, 2 channels
  [3] audit > write_3  x2
      -> [5] all, from side output rare, 4 channels
  [4] write_2  x2
  [5] write_4  x2

in a burst (dual=...)
  read     stays: it reads; its raw input goes to Spark
  split    can go to Spark
  write    stays: it writes, by epochs
  count    stays: its state stays with its tasks; Spark makes partial aggregates for it
  audit    stays: its state and timers are the function's own
  write_2  stays: it writes, by epochs
  write_3  stays: it writes, by epochs
  write_4  stays: it writes, by epochs
"""


def note(ctx: ProcessContext, key: str, record: tuple[str, int]) -> None:
    """Never called."""


def words() -> Flow:
    flow = Flow("words", parallelism=2)
    split = flow.read(Memory(["to be", "or not"]), parallelism=1).flat_map(
        str.split, name="split", parallelism=1, on_error="dead_letter"
    )
    split.dead_letters().write(Null(), parallelism=1)
    counts = split.key_by(str.lower).count()
    audit = counts.key_by(0).process(note, outputs=("rare",), name="audit")
    counts.write(Null())
    audit.write(Null())
    audit.side_output("rare").broadcast().write(Null())
    return flow


def test_a_flow_is_explained_like_this() -> None:
    assert words().explain(workers=2) == GOLDEN


def behind_keyed_operators() -> Flow:
    """Returns a flow whose stateless operators stand before a keyed operator, behind it in its chain, and in a chain
    of their own."""
    flow = Flow("behind", parallelism=2)
    counts = (
        flow.read(Memory(["to be"])).flat_map(str.split, name="split").key_by(str.lower).process(note, name="audit")
    )
    counts.map(str, name="text").rebalance().map(len, name="length").write(Null(), name="out")
    return flow


def test_an_operator_behind_one_that_stays_in_its_chain_is_not_said_to_go_to_spark() -> None:
    reasons = staying(behind_keyed_operators().plan(2))
    assert reasons["text"] == "it follows audit in its chain, which stays"
    assert "split" not in reasons
    assert "length" not in reasons  # it begins a chain of its own
    assert "  text    stays: it follows audit in its chain, which stays\n" in behind_keyed_operators().explain(
        workers=2
    )


def test_what_can_go_to_spark_is_what_the_ranges_contain() -> None:
    for flow in (words(), behind_keyed_operators()):
        plan = flow.plan(2, check_sinks=False)
        forms = [range_form(plan, chain) for chain in plan.chains]
        crossing = {name for form in forms if isinstance(form, RangeForm) for name in form.names}
        assert crossing == set(flow.graph.operators) - set(staying(plan))
