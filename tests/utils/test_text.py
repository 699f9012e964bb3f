from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_stream.utils.text import Table, printable, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (9_996, "10.0 KB"),
        (99_949, "99.9 KB"),
        (999_499, "999 KB"),
        (999_500, "1.00 MB"),
        (90_868_376, "90.9 MB"),
        (5_000_000_000, "5.00 GB"),
        (1_500_000_000_000_000, "1500 TB"),
    ],
)
def test_sizes_have_three_digits(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_tables_have_a_line_for_each_row_whatever_the_cells_are(rows: list[tuple[str, str]]) -> None:
    lines = str(Table(("a", "b"), rows, right=("b",))).split("\n")

    assert len(lines) == 1 + len(rows)
    assert all(map(str.isprintable, lines))
    for (left, right), line in zip(rows, lines[1:], strict=True):
        assert line.startswith(printable(left).rstrip())
        assert line.endswith(printable(right).rstrip())


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5), st.integers(0, 100))
def test_tables_fit_a_width_as_long_as_cells_keep_enough_to_be_told_apart(
    rows: list[tuple[str, str]], width: int
) -> None:
    table = Table(("a", "b"), rows, flexible="b")
    full = table.text().split("\n")
    fitted = table.text(width).split("\n")

    assert len(fitted) == len(full)
    if max(map(len, full)) <= width:
        assert fitted == full
    for (left, right), line in zip(rows, fitted[1:], strict=True):
        assert line.startswith(printable(left).rstrip())
        assert line.endswith(printable(right)[-9:].rstrip())
        assert len(line) <= max(width, max(len(printable(name)) for name, _ in [("a", ""), *rows]) + 2 + 12)


def test_a_shortened_cell_keeps_its_end_and_an_expendable_column_goes_before() -> None:
    row = ("model.layers.0.self_attn.q_proj.weight", "1 KB", "model.safetensors")
    table = Table(("name", "bytes", "file"), [row], right=["bytes"], flexible="name", expendable="file")

    assert table.text(50).split("\n") == [f"name{' ' * 36}bytes", f"{row[0]}   1 KB"]
    assert table.text(30).split("\n") == [f"name{' ' * 21}bytes", "...f_attn.q_proj.weight   1 KB"]
    assert table.text(10).split("\n")[1] == "...oj.weight   1 KB"


class Cells(HTMLParser):
    """The text of each cell, as a browser reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if data.strip("\n") and self.cells:
            self.cells[-1] += data


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_html_holds_every_cell_and_nothing_that_the_cells_bring(rows: list[tuple[str, str]]) -> None:
    parser = Cells()
    parser.feed(Table(("<b>", "&amp;"), rows, right=("<b>",)).html())

    assert parser.cells == ["<b>", "&amp;", *(printable(cell) for row in rows for cell in row)]
    assert parser.tags <= {"table", "thead", "tbody", "tr", "th", "td"}


@given(st.text())
def test_printable_text_is_printable_and_unchanged_if_it_was(text: str) -> None:
    assert printable(text).isprintable()
    assert not text.isprintable() or printable(text) == text
