"""Write docs/reference.md from the signatures and docstrings of the public names.

python scripts/reference.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_stream
from hf_stream import errors, layouts
from hf_stream.integrations import peft

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
INTRODUCTION = """\
# Reference

Generated from docstrings by `scripts/reference.py`; do not edit. Start with the [layouts guide](layouts.md) or
[how it works](how-it-works.md) if you are new. Sizes are in bytes; `buffer_size` is 64 MiB by default.
"""
SECTIONS = {
    "Models of transformers": [
        "from_pretrained",
        "save_pretrained",
        "enable",
        "disable",
        "streaming",
        "StreamingMixin",
        "StreamingCheckpointCallback",
    ],
    "Checkpoints": [
        "open_checkpoint",
        "Checkpoint",
        "save_checkpoint",
        "CheckpointWriter",
        "load_into",
        "convert",
        "plan_conversion",
        "Conversion",
        "verify",
        "Differences",
        "Difference",
    ],
    "Nested states": ["save_nested", "open_nested", "load_nested"],
    "Lazy tensors": ["LazyTensor", "materialize"],
    "Layouts": ["Layout"],
}
TREE = ["CheckpointError", "CopyError", "FormatError", "HfStreamError", "LayoutError", "LazyTensorError"]
_HEADINGS = re.compile(r"(Args|Attributes|Raises|Returns):")


class _Verbatim(str):
    """An annotation as written in the source; `repr` would put it in quotes."""

    __repr__ = str.__str__


def page() -> str:
    """The whole of docs/reference.md."""
    documented = sorted([name for names in SECTIONS.values() for name in names] + TREE + ["layouts"])
    if documented != sorted(hf_stream.__all__):
        raise SystemExit(f"scripts/reference.py: {set(documented) ^ set(hf_stream.__all__)} belongs to no section")
    lines = [INTRODUCTION]
    for section, names in SECTIONS.items():
        lines.append(f"## {section}\n")
        for name in names:
            lines += _entry(f"hf_stream.{name}", getattr(hf_stream, name))
    lines.append("## PEFT\n")
    for name in peft.__all__:
        lines += _entry(f"hf_stream.integrations.peft.{name}", getattr(peft, name))
    lines.append("## Rules and ready-made layouts\n")
    for name in layouts.__all__:
        if name not in hf_stream.__all__:
            lines += _entry(f"hf_stream.layouts.{name}", getattr(layouts, name))
    lines.append("## Errors\n")
    lines += _text(inspect.getdoc(errors) or "")
    return "\n".join(lines).rstrip() + "\n"


def _entry(path: str, thing: Any) -> Iterator[str]:
    yield f"### `{path}`\n"
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        yield f"`{thing}`\n".replace("collections.abc.", "")
        return
    documentation = inspect.getdoc(thing) or ""
    if inspect.isfunction(thing) or "Args:" in documentation:
        yield _signature(thing.__name__, thing)
    yield from _text(documentation)
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            yield from _member(name, member)


def _member(name: str, member: Any) -> Iterator[str]:
    """A method or property that has a docstring of its own."""
    bound = isinstance(member, classmethod | staticmethod)
    function = member.fget if isinstance(member, property) else member.__func__ if bound else member
    documentation = getattr(function, "__doc__", None)
    if not inspect.isfunction(function) or not documentation or (name[0] == "_" and name not in ("__call__", "__or__")):
        return
    yield f"#### `{name}`\n"
    if not isinstance(member, property):
        yield _signature(name, function, skip=not isinstance(member, staticmethod))
    yield from _text(inspect.cleandoc(documentation))


def _signature(name: str, function: Any, skip: bool = False) -> str:
    signature = inspect.signature(function)
    rows: list[str] = []
    starred = False
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            rows.append("*")
        starred = starred or parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        rows.append(str(parameter.replace(annotation=_Verbatim(parameter.annotation))))
    result = "" if inspect.isclass(function) else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(rows)}){result}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {row}," for row in rows), f"){result}"])
    return f"```text\n{line}\n```\n"


def _text(documentation: str) -> Iterator[str]:
    """A docstring as Markdown: sections become lists, examples become code; the rest is Markdown already."""
    for block in re.split(r"\n\n+", documentation):
        heading = _HEADINGS.match(block)
        if heading:
            yield f"**{heading[1]}**\n"
            lines = inspect.cleandoc(block[heading.end() :]).split("\n")
            yield "\n".join(lines if heading[1] == "Returns" else map(_item, lines)) + "\n"
        elif block.startswith((">>>", "HfStreamError\n")):
            yield f"```text\n{block}\n```\n"
        else:
            yield block + "\n"


def _item(line: str) -> str:
    """`name: text` as an item of a list; a line that goes on with the text stays with its item."""
    names, colon, text = line.partition(": ")
    if line.startswith(" ") or not colon:
        return f"  {line.strip()}"
    return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {text}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
