"""Text for people: sizes, tables, and names that cannot play tricks on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: int) -> str:
    """Bytes with three digits and a unit in powers of 1000, as `--max-shard-size` reads them: 90868376 -> "90.9 MB"."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KB", "MB", "GB", "TB"):
        value /= 1000
        # Rounding must not make 1000 of anything below the largest unit.
        if value < 999.5 or unit == "TB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def count(number: int, noun: str) -> str:
    """A number and its noun: (1, "file") -> "1 file", (1200, "file") -> "1,200 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """The text with control characters, line breaks and the like written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def shortened(text: str, width: int) -> str:
    """The text on one line, cut after `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns under their heads, two spaces apart.

    Args:
        heads: What the columns are called.
        rows: A cell for each column.
        right: Heads of the columns that are flush right.
    """
    lines = [heads, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    flush = [">" if head in right else "<" for head in heads]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, flush, widths, strict=True)).rstrip()
        for line in lines
    )
