"""Every code block of README.md and docs/ runs, page by page, as a reader would run it from top to bottom.

The `python` and `sh` blocks of a page become one program in an empty working directory: names and files made by one
block are there for the next. Line numbers of the program are those of the page. A `text` block right after such a block
is what the block prints, to the letter. README's set-up commands are left out, because .ci/run executes them before
anything else.
"""

from __future__ import annotations

import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_stream

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)\s*$")
_SHELL = "__import__('subprocess').run(['bash', '-euo', 'pipefail', '-c', {script!r}], check=True)"
# What a block prints stands between two of these.
_EDGE = "\x1e"
_PRINT_EDGE = f"print({_EDGE!r}, end='', flush=True)"


def program_of(page: str) -> tuple[str, dict[int, str]]:
    """Turn a Markdown page into a Python program with the same line numbers.

    Args:
        page: Text of the page.

    Returns:
        The code of the `python` blocks, shell blocks as calls, and an empty line for every other line but the blocks'
        fences, which print an edge; and what the page says that its blocks print, by the block's place among them.
    """
    program: list[str] = []
    outputs: dict[int, str] = {}
    section = ""
    block: list[str] | None = None
    language = indent = ""
    blocks = 0
    since_block = 2  # lines since the last block that runs
    for line in page.splitlines():
        program.append("")
        fence = _FENCE.match(line)
        if block is None:
            since_block += 1
            if fence:
                block, language, indent = [], fence["language"], fence["indent"]
            elif line.startswith("## "):
                section = line.removeprefix("## ")
        elif fence:
            if language == "python" or (language == "sh" and section != "Set-up"):
                code = block if language == "python" else [_SHELL.format(script="\n".join(block))]
                start = len(program) - 2 - len(block)
                program[start] = program[-1] = _PRINT_EDGE
                program[start + 1 : start + 1 + len(code)] = code
                blocks += 1
                since_block = 0
            elif language == "text" and since_block == 2:
                outputs[blocks - 1] = "".join(f"{line}\n" for line in block)
            block = None
        else:
            block.append(line.removeprefix(indent))
    return "\n".join(program) + "\n", outputs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_page_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    program, outputs = program_of(page.read_text(encoding="utf-8"))
    if not program.strip():
        pytest.skip("no code on this page")
    script = tmp_path / f"page_{page.stem}.py"  # peft.py would hide the package
    script.write_text(program, encoding="utf-8")
    working = tmp_path / "working"
    working.mkdir()

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        [sys.executable, "-u", str(script)],
        cwd=working,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert run.returncode == 0, f"{page.name} fails:\n{run.stdout}\n{run.stderr}"
    printed = run.stdout.split(_EDGE)[1::2]
    assert {place: printed[place] for place in outputs} == outputs


def test_reference_is_what_the_docstrings_say() -> None:
    reference = runpy.run_path(str(ROOT / "scripts" / "reference.py"))
    written = reference["PAGE"].read_text(encoding="utf-8")
    assert written == reference["page"](), "docs/reference.md is stale: run python scripts/reference.py"


@pytest.mark.parametrize("name", [name for name in hf_stream.__all__ if name != "layouts"])
def test_examples_in_docstrings_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    public = {public: getattr(hf_stream, public) for public in hf_stream.__all__}
    names = {"hf_stream": hf_stream, "torch": torch, **vars(hf_stream.layouts), **public}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF)
    for example in doctest.DocTestFinder().find(getattr(hf_stream, name), name, globs=names):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_program_of_page_keeps_line_numbers_order_and_indentation() -> None:
    page = """# Title
```python
x = 1
```
- item
  ```python
  if x:
      y = 2
  ```
```sh
echo "$HOME" > file
```
```text
not its output: no line between
```
## Set-up
```sh
exit 1
```
## After
```python
assert (x, y) == (1, 2)
print(x)
```

```text
1
```

```text
an example of something else
```
"""
    program, outputs = program_of(page)
    lines = program.splitlines()

    assert lines[1:4] == [_PRINT_EDGE, "x = 1", _PRINT_EDGE]
    assert lines[6:8] == ["if x:", "    y = 2"]
    assert lines[10] == _SHELL.format(script='echo "$HOME" > file')
    assert lines[21:23] == ["assert (x, y) == (1, 2)", "print(x)"]
    assert [number for number, line in enumerate(lines) if line and line != _PRINT_EDGE] == [2, 6, 7, 10, 21, 22]
    assert outputs == {3: "1\n"}
