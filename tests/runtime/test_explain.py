"""What `flow.explain()` shows people."""

from __future__ import annotations

from penstock.runtime.operators.process import ProcessContext
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
