"""A source of Parquet files: dicts, one a row.

It must never read columns or row groups that the job does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.runtime.errors import FlowError, SourceError, shorten
from penstock.runtime.sources.base import Reader, SourceContext, Split
from penstock.runtime.sources.file_source import FileSource
from penstock.runtime.sources.marks import find_again, mark_of
from penstock.runtime.sources.paths import Patterns, find_files
from penstock.runtime.sources.rows import BATCH_ROWS, RowReader, check_schemas

Condition = tuple[str, str, Any]
Filters = Sequence[Condition] | Sequence[Sequence[Condition]]


class Parquet(FileSource[dict[str, Any]]):
    """Reads the rows of Parquet files, each as a dict.

        flow.read(ps.sources.Parquet("rides/*.parquet", columns=["city", "fare"], filters=[("fare", ">", 0)]))

    `patterns`: a path, a pattern or a list of them, as in TextFiles. `columns`: the names to read (None:
    all).
    `filters`: conditions (column, operator, value) of which all must hold, or a list of such lists of which
    one must hold, as in pyarrow; operators are =, !=, <, >, <=, >=, in, not in. Row groups whose statistics
    rule out a match are not read. A filter's column need not be among `columns`.

    Row groups are shared among the tasks: a file of one row group is read by one task. Before a `watermark`, read each
    file with a parallelism of 1 ("Several files" in docs/flows.md).

    Errors: SourceError before the start when a file is missing or not a Parquet file, a column is unknown, or
    the files differ in their fields; while running when a row group is damaged, or a file has gone or was
    replaced by another.

    Offset: the number of rows of the row group that were handed out (those that passed the filters).
    """

    def __init__(
        self, patterns: Patterns, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> None:
        super().__init__(patterns)
        if columns is not None and (
            isinstance(columns, str)
            or not isinstance(columns, Sequence)
            or not columns
            or not all(isinstance(name, str) for name in columns)
        ):
            raise FlowError(f"Parquet: columns must be a list of column names, or None for all, got {shorten(columns)}")
        self.columns = None if columns is None else list(columns)
        self.filters = None if filters is None else _conditions(filters)

    def splits(self, parallelism: int) -> list[Split]:
        from pyarrow import dataset, fs

        files = find_files(self.patterns, "Parquet")
        footers = {path: _footer(path) for path in files}
        schemas = {path: footer.schema.to_arrow_schema() for path, footer in footers.items()}
        check_schemas("Parquet", schemas)
        self._check_columns(files[0], schemas[files[0]])
        splits: list[Split] = []
        for path, footer in footers.items():
            mark = mark_of(path, "Parquet", indexed=True)
            groups = list(range(footer.num_row_groups))
            if self.filters is not None:
                fragment = dataset.ParquetFileFormat().make_fragment(path, fs.LocalFileSystem())
                try:
                    kept = fragment.split_by_row_group(filter=self._expression(), schema=schemas[path])
                except (pa.ArrowException, OSError) as error:
                    raise FlowError(f"Parquet: filters={self.filters!r} do not fit {path!r}: {error}") from error
                groups = [piece.row_groups[0].id for piece in kept]
            for group in groups:
                rows = footer.row_group(group).num_rows
                splits.append(Split(f"{path}[{group}]", (path, group, mark), weight=float(max(1, rows))))
        return splits

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return RowReader(splits, self._batches, lambda split: int(split.weight))

    def fields(self) -> list[str]:
        """Returns the columns that are read. Raises SourceError when the first file cannot be read."""
        if self.columns is not None:
            return list(self.columns)
        return list(_footer(find_files(self.patterns, "Parquet")[0]).schema.to_arrow_schema().names)

    def _expression(self) -> Any:
        from pyarrow import parquet

        return parquet.filters_to_expression(self.filters)

    def _check_columns(self, path: str, schema: pa.Schema) -> None:
        asked = list(self.columns or [])
        for group in self.filters or []:
            asked += [name for name, _, _ in group]
        unknown = [name for name in asked if name not in schema.names]
        if unknown:
            raise SourceError(
                f"Parquet: {path!r} has no column {', '.join(map(repr, unknown))}; it has {', '.join(schema.names)}"
            )

    def _batches(self, split: Split) -> Iterator[pa.RecordBatch]:
        from pyarrow import parquet

        path, group, mark = split.payload
        columns = self.columns
        if columns is not None and self.filters is not None:
            extra = {name for conditions in self.filters for name, _, _ in conditions}
            columns = columns + sorted(extra.difference(columns))
        try:
            place = find_again(path, mark, f"Parquet, row group {group}")
            # Spark's old timestamps have room for nanoseconds, and nothing in them; a datetime has none.
            with parquet.ParquetFile(place, coerce_int96_timestamp_unit="us") as file:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    if self.filters is None and self.columns is None:
                        yield batch
                        continue
                    table = pa.Table.from_batches([batch])
                    if self.filters is not None:
                        table = table.filter(self._expression())
                    if self.columns is not None:
                        table = table.select(self.columns)
                    yield from table.to_batches()
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"Parquet: cannot read row group {group} of {path!r}: {error}") from error


def _conditions(filters: Any) -> list[list[Condition]]:
    """Returns the filters as a list of lists of conditions, checked as far as possible without a file."""
    from pyarrow import parquet

    try:
        groups = [filters] if isinstance(filters[0][0], str) else filters
        conditions = [[(name, op, value) for name, op, value in group] for group in groups]
        parquet.filters_to_expression(conditions)
    except (TypeError, ValueError, LookupError) as error:
        raise FlowError(
            f"Parquet: filters must be a list of tuples such as ('fare', '>', 0), got {shorten(filters)} ({error})"
        ) from error
    return conditions


def _footer(path: str) -> Any:
    from pyarrow import parquet

    try:
        return parquet.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"Parquet: {path!r} is not a Parquet file that can be read: {error}. Narrow the pattern, or write it again."
        ) from error
