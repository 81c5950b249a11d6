"""Arrow IPC files and streams as a source: dicts, one a row.

It must never map a file into memory: a mapped file that shrinks kills the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from penstock.runtime.errors import SourceError
from penstock.runtime.sources.base import Reader, SourceContext, Split
from penstock.runtime.sources.file_source import FileSource
from penstock.runtime.sources.marks import find_again, mark_of
from penstock.runtime.sources.paths import find_files
from penstock.runtime.sources.rows import BATCH_ROWS, RowReader, check_schemas

_FILE_MAGIC = b"ARROW1"


class Arrow(FileSource[dict[str, Any]]):
    """Reads the rows of Arrow IPC files (also called Feather version 2) and of files that hold an IPC stream, as dicts.

        flow.read(ps.sources.Arrow("features/*.arrow"))

    `patterns`: a path, a pattern or a list of them, as in TextFiles. A file's record batches are shared among
    the tasks; a stream, which can only be read from its beginning, has one task.

    Errors: SourceError before the start when a file is missing or neither form, or the files differ in their
    fields; while running when one is damaged, too short, or replaced by another.

    Offset: the number of rows of the split that were handed out.
    """

    def splits(self, parallelism: int) -> list[Split]:
        schemas: dict[str, pa.Schema] = {}
        splits: list[Split] = []
        for path in find_files(self.patterns, "Arrow"):
            try:
                with pa.OSFile(path) as file:
                    size = float(max(1, file.size()))
                    reader = _open(file)
                    schemas[path] = reader.schema
                    if isinstance(reader, ipc.RecordBatchStreamReader):
                        mark = mark_of(path, "Arrow")
                        splits.append(Split(path, (path, None, None, mark), weight=size))
                        continue
                    total = reader.num_record_batches
            except (pa.ArrowException, OSError) as error:
                raise SourceError(
                    f"Arrow: {path!r} is neither an Arrow IPC file nor an IPC stream that can be read: "
                    f"{error}. "
                    "Narrow the pattern, or write it again."
                ) from error
            mark = mark_of(path, "Arrow", indexed=True)
            count = max(1, min(parallelism, total))
            bounds = [total * i // count for i in range(count + 1)]
            for first, last in pairwise(bounds):
                splits.append(Split(f"{path}[{first}:{last}]", (path, first, last, mark), weight=size / count))
        check_schemas("Arrow", schemas)
        return splits

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return RowReader(splits, _batches)

    def fields(self) -> list[str]:
        """Returns the columns. Raises SourceError when the first file cannot be read."""
        path = find_files(self.patterns, "Arrow")[0]
        try:
            with pa.OSFile(path) as file:
                return list(_open(file).schema.names)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"Arrow: cannot read {path!r}: {error}") from error


def _open(file: Any) -> Any:
    is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    file.seek(0)
    return ipc.open_file(file) if is_file else ipc.open_stream(file)


def _batches(split: Split) -> Iterator[pa.RecordBatch]:
    path, first, last, mark = split.payload
    try:
        with pa.OSFile(find_again(path, mark, "Arrow")) as file:
            reader = _open(file)
            whole = reader if first is None else (reader.get_batch(i) for i in range(first, last))
            for batch in whole:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield batch.slice(start, BATCH_ROWS)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"Arrow: cannot read {split.name!r}: {error}") from error
