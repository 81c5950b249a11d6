"""A source of text files: one record a line.

Its reader also serves JsonLines. It must never wait for more data at the end of a file, and never hold more
of a file than one block and the records made from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.runtime.sources.base import (
    ColumnReader,
    Reader,
    SequentialReader,
    SourceContext,
    Split,
    T_co,
    sampled,
)
from penstock.runtime.sources.blocks import ABANDONED, FileRange, LineBlocks, ranges
from penstock.runtime.sources.file_source import FileSource
from penstock.runtime.sources.gunzip import CorruptGzip
from penstock.runtime.sources.lines import Block, Decoder, TextDecoder, Unreadable, readable
from penstock.runtime.sources.marks import BEFORE, FilePosition, mark_of
from penstock.runtime.sources.paths import Patterns, find_files
from penstock.runtime.units import flag, whole

MIN_RANGE = 256 << 10  # bytes; a shorter range costs more to start than it gains
MAX_LINE = 64 << 20
_RANGES_A_READER = 4  # enough to share many files evenly without dividing each of them
TEXT_RATIO = 3  # about how much text is in a gzip file, for sharing the work
LINE_BYTES = 100  # taken for the mean size of a line, or a row, before one was read


class LineFiles(FileSource[T_co]):
    """Files of lines: what TextFiles and JsonLines have in common."""

    def __init__(self, patterns: Patterns, *, parallel: bool, max_line_bytes: int) -> None:
        super().__init__(patterns)
        name = type(self).__name__
        self.parallel = flag(parallel, f"{name}: parallel")
        self.max_line_bytes = whole(max_line_bytes, f"{name}: max_line_bytes")

    def decoder(self) -> Decoder:
        """Turns the bytes of whole lines into records; made in the worker."""
        raise NotImplementedError

    def splits(self, parallelism: int) -> list[Split]:
        name = type(self).__name__
        marks = {path: mark_of(path, name) for path in find_files(self.patterns, name)}
        whole = sum(mark.size for mark in marks.values())
        smallest = max(MIN_RANGE, whole // (max(1, parallelism) * _RANGES_A_READER))
        splits: list[Split] = []
        for path, mark in marks.items():
            if path.lower().endswith(".gz"):
                part = FileRange(path, mark=mark)
                splits.append(Split(path, part, weight=float(max(1, mark.size * TEXT_RATIO))))
                continue
            parts = ranges(path, mark.size, parallelism if self.parallel else 1, smallest)
            for part in parts:
                label = path if len(parts) == 1 else f"{path}[{part.start}:{part.end}]"
                weight = float(max(1, (part.end or 0) - part.start))
                splits.append(Split(label, replace(part, mark=mark), weight=weight))
        return splits

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return LineReader(splits, context, self.decoder(), self.max_line_bytes, type(self).__name__)


class TextFiles(LineFiles[str]):
    """Reads the lines of text files, each a str without its line end ("\\n" or "\\r\\n").

        flow.read(ps.sources.TextFiles("logs/*.txt"))
        flow.read(ps.sources.TextFiles(["a.txt", "b.txt.gz"], encoding="latin-1"))

    `patterns`: a path, a pattern (`*`, `?`, `[...]`, `**` for sub-folders) or a list of them; each file is
    read once. Every node that runs tasks of the source must see the files under the same paths. A task reads its
    files one after the other: with a `watermark`, windows stay open until it has begun its last file ("Several files"
    in docs/flows.md).
    `encoding`: any in which a line ends with the byte 0x0A (not UTF-16 or UTF-32); "utf-8-sig" also drops a
    byte order mark, which is otherwise part of the first line.
    `parallel`: let several tasks share a large file, which are then at different places in it; False keeps
    the lines of a file in one task, in order. A name that ends with ".gz" is a gzip file, which always has
    one task.
    `max_line_bytes`: the longest line allowed, without its line end, so that memory stays bounded.

    Empty lines are records. Only "\\n" and "\\r\\n" end a line. What is appended to a file after the job
    started is not read, save the rest of a line that was begun.

    Errors: SourceError before the start when a file is missing, a pattern matches none, or one cannot be
    opened, and while running when a file shrinks or vanishes, when a line is longer than `max_line_bytes` (the
    lines before it are handed out first), or when a job that goes back finds another file under its name (one
    that was only renamed, in its directory, is read on). A line that is not valid in the
    encoding is a failed record (its bytes), and so is, as a whole, the rest of a gzip file after a damaged
    place (the file's path): the operator's on_error decides about both. Damaged compressed
    data may yield some wrong lines before it shows, as with any gzip reader.

    Offset: the position in bytes after the last line, in a gzip file that in the decompressed content (a
    restart decompresses up to it again); -1 after a damaged place.
    """

    hands_columns = True

    def __init__(
        self,
        patterns: Patterns,
        *,
        encoding: str = "utf-8",
        parallel: bool = True,
        max_line_bytes: int = MAX_LINE,
    ) -> None:
        super().__init__(patterns, parallel=parallel, max_line_bytes=max_line_bytes)
        self.encoding = encoding
        TextDecoder(encoding)  # refuses an encoding that will not do

    def decoder(self) -> Decoder:
        return TextDecoder(self.encoding)

    def sample(self, rows: int) -> Any:
        """Returns a sample of the lines; see Source.sample."""
        return sampled(self, self.splits(1)[:1], rows)

    def reader(self, splits: list[Split], context: SourceContext) -> TextReader:
        decoder = TextDecoder(self.encoding)
        return TextReader(splits, context, decoder, self.max_line_bytes, type(self).__name__)


class LineReader(SequentialReader):
    """Reads file ranges one after the other."""

    def __init__(
        self, splits: list[Split], context: SourceContext, decode: Decoder | None, max_line: int, source: str
    ) -> None:
        super().__init__(splits)
        self._context = context
        self._decode = decode
        self._max_line = max_line
        self._source = source
        self._blocks: LineBlocks | None = None
        self._block: Block | None = None
        self._before = b""  # the last bytes before the block
        self._next = 0  # the first record of the block not handed out
        self._lines_read = self._bytes_read = 0  # of whole blocks

    def read(self, limit: int) -> list[Any]:
        while not self.finished:
            block = self._block
            if block is not None and self._next < len(block.records):
                records = self._take(block, limit)
                if not isinstance(records, list):
                    records = records.to_pylist()
                return records if block.clean else readable(records, self._context.errors)
            self._advance()
        return []

    def _take(self, block: Block, limit: int) -> Any:
        first = self._next
        assert self._split is not None
        self.split = self._split.name
        self._next = min(first + limit, len(block.records))
        return block.records[first : self._next]

    def _advance(self, columns: bool = False) -> None:
        """Goes to the next block, in this file range or the next one. Its lines become an Arrow column where that is
        possible."""
        if self._split is None:
            if not self._waiting:
                self.finished = True
                return
            self._split = split = self._waiting.popleft()
            self._before = b""
            try:
                self._blocks = self._open(split)
            except CorruptGzip as error:  # damaged before the offset, where it was sound before
                self._block = self._damaged(split, split.offset or 0, error)
                self._next = 0
                return
        if self._block is not None:
            self._offsets[self._split.name] = self._offset_after(self._block, len(self._block.records))
            self._before = self._block.data[-BEFORE:]
            self._block = None
        split = self._split
        if self._blocks is None:
            self._split = None
            return
        base = self._blocks.position
        try:
            data = self._blocks.next()
        except CorruptGzip as error:
            self._block = self._damaged(split, base, error)
        else:
            base = self._blocks.position - len(data)
            if not data:
                if base != self._offsets[split.name]:
                    self._offsets[split.name] = base
                self._close_file()
                self._split = None
                return
            self._block = self._decoded(split, data, base, columns)
            self._lines_read += len(self._block.records)
            self._bytes_read += len(data)
        self._next = 0

    def _open(self, split: Split) -> LineBlocks:
        return LineBlocks(split.payload, split.offset, self._max_line, self._source)

    def _decoded(self, split: Split, data: bytes, base: int, columns: bool) -> Block:
        """Decodes a block."""
        assert self._decode is not None
        records, clean = self._decode(data, split.payload.path, base)
        return Block(base, data, records, clean)

    def _damaged(self, split: Split, base: int, error: CorruptGzip) -> Block:
        """Turns the rest of the file into one failed record."""
        self._close_file()
        return Block(base, b"", [Unreadable(split.payload.path, error)], clean=False, after=ABANDONED)

    def _close_file(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None

    def backlog(self) -> int:
        # Read once, because the loop's thread may change it meanwhile.
        split, blocks, block = self._split, self._blocks, self._block
        left = sum(_bytes_left(one, one.offset) for one in tuple(self._waiting))
        if split is not None and blocks is not None:
            left += _bytes_left(split, blocks.position)
        mean = self._bytes_read / self._lines_read if self._lines_read else LINE_BYTES
        return int(left / mean) + (0 if block is None else max(0, len(block.records) - self._next))

    def offsets(self) -> dict[str, Any]:
        if self._split is not None and self._block is not None:
            self._offsets[self._split.name] = self._offset_after(self._block, self._next)
        return super().offsets()

    def _offset_after(self, block: Block, count: int) -> Any:
        """Returns the offset after the first records of a block."""
        offset = block.offset(count)
        if offset == ABANDONED:
            return offset
        read = offset - block.base
        before = self._before + block.data[max(0, read - BEFORE) : read]
        assert self._split is not None
        known = self._offsets[self._split.name]
        return FilePosition.after(offset, before) if before or known != offset else known

    def close(self) -> None:
        self.offsets()  # which must still be right afterwards
        self._close_file()
        self._block = None
        super().close()


def _bytes_left(split: Split, offset: int | None) -> float:
    """Returns how many bytes a file range has from an offset on. Of a gzip file it is an estimate."""
    if offset is None or offset == ABANDONED:
        return 0.0 if offset == ABANDONED else split.weight
    part: FileRange = split.payload
    return max(0.0, part.start + split.weight - offset)


class TextReader(LineReader, ColumnReader):
    """Reads lines, also as an Arrow column without touching a row in Python."""

    def read_arrow(self, limit: int) -> Any:
        """Returns lines as a RecordBatch; see ColumnReader.read_arrow."""
        import pyarrow as pa

        lines: Any = []
        while not self.finished:
            block = self._block
            if block is not None and self._next < len(block.records):
                lines = self._take(block, limit)
                if isinstance(lines, list) and not block.clean:
                    lines = readable(lines, self._context.errors)
                break
            self._advance(columns=True)
        column = pa.array(lines, pa.string()) if isinstance(lines, list) else lines
        return pa.record_batch([column], ["value"])

    def _decoded(self, split: Split, data: bytes, base: int, columns: bool) -> Block:
        if columns and isinstance(self._decode, TextDecoder):
            column = self._decode.column(data, base)
            if column is not None:  # else the lines have to be decoded one by one
                return Block(base, data, column, clean=True)
        return super()._decoded(split, data, base, columns)
