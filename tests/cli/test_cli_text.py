from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_stream.cli.text import printable, size, table


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
    lines = table(("a", "b"), rows, right=("b",)).split("\n")

    assert len(lines) == 1 + len(rows)
    assert all(map(str.isprintable, lines))
    for (left, right), line in zip(rows, lines[1:], strict=True):
        assert line.startswith(printable(left).rstrip())
        assert line.endswith(printable(right).rstrip())


@given(st.text())
def test_printable_text_is_printable_and_unchanged_if_it_was(text: str) -> None:
    assert printable(text).isprintable()
    assert not text.isprintable() or printable(text) == text
