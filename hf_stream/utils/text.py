"""Text for people: sizes, tables, and names that cannot play tricks on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from html import escape

_DOTS = "..."
_NARROWEST = 12


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


def shortened(text: str, length: int) -> str:
    """The text on one line, cut after so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - len(_DOTS)] + _DOTS


@dataclass(frozen=True)
class Table:
    """Columns under their heads, and lines below them.

    Attributes:
        heads: What the columns are called.
        rows: A cell for each column.
        right: Heads of the columns that are flush right.
        flexible: Head of the column whose cells lose their beginnings where there is no room for them.
        expendable: Head of the column that is left out before that.
        footer: Lines below.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[str] = ()
    flexible: str | None = None
    expendable: str | None = None
    footer: Sequence[str] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The columns two spaces apart, in lines of at most `width` characters as far as that can be."""
        lines = [self.heads, *([printable(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        excess = 0 if width is None else sum(widths) + 2 * (len(widths) - 1) - width
        if excess > 0 and self.expendable in self.heads:
            return self._without(self.heads.index(self.expendable)).text(width)
        if excess > 0 and self.flexible is not None:
            place = self.heads.index(self.flexible)
            widths[place] = max(widths[place] - excess, min(widths[place], _NARROWEST))
        flush = [">" if head in self.right else "<" for head in self.heads]
        written = (
            "  ".join(
                f"{_ending(cell, width):{side}{width}}" for cell, side, width in zip(line, flush, widths, strict=True)
            ).rstrip()
            for line in lines
        )
        return "\n".join([*written, *map(printable, self.footer)])

    def _without(self, place: int) -> Table:
        heads, *rows = ([*row[:place], *row[place + 1 :]] for row in (self.heads, *self.rows))
        return replace(self, heads=heads, rows=rows)

    def html(self) -> str:
        """The same as HTML, for notebooks."""
        styles = [
            ' style="text-align: right"' if head in self.right else ' style="text-align: left"' for head in self.heads
        ]

        def row(kind: str, cells: Sequence[str]) -> str:
            inner = (
                f"<{kind}{style}>{escape(printable(cell))}</{kind}>" for cell, style in zip(cells, styles, strict=True)
            )
            return f"<tr>{''.join(inner)}</tr>"

        lines = ["<table>", f"<thead>{row('th', self.heads)}</thead>", "<tbody>"]
        lines += [row("td", cells) for cells in self.rows]
        lines += ["</tbody>", "</table>", *(f"<p>{escape(printable(line))}</p>" for line in self.footer)]
        return "\n".join(lines)


def _ending(text: str, length: int) -> str:
    """The text, or as much of its end as there is room for: names differ there."""
    return text if len(text) <= length else _DOTS + text[len(_DOTS) - length :]
