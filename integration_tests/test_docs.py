"""Every code block of README.md and docs/ runs, page by page, as a reader would run it from top to bottom.

The `python` and `sh` blocks of a page become one program in an empty working directory: names and files made by one
block are there for the next. Line numbers of the program are those of the page. README's set-up commands are left out,
because .ci/run executes them before anything else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)\s*$")
_SHELL = "__import__('subprocess').run(['bash', '-euo', 'pipefail', '-c', {script!r}], check=True)"


def program_of(page: str) -> str:
    """Turn a Markdown page into a Python program with the same line numbers.

    Args:
        page: Text of the page.

    Returns:
        The code of the `python` blocks, shell blocks as calls, and an empty line for every other line.
    """
    program: list[str] = []
    section = ""
    block: list[str] | None = None
    language = indent = ""
    for line in page.splitlines():
        program.append("")
        fence = _FENCE.match(line)
        if block is None:
            if fence:
                block, language, indent = [], fence["language"], fence["indent"]
            elif line.startswith("## "):
                section = line.removeprefix("## ")
        elif fence:
            if language == "python":
                program[-1 - len(block) : -1] = block
            elif language == "sh" and section != "Set-up":
                program[-1] = _SHELL.format(script="\n".join(block))
            block = None
        else:
            block.append(line.removeprefix(indent))
    return "\n".join(program) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_page_runs(page: Path, tmp_path: Path) -> None:
    program = program_of(page.read_text(encoding="utf-8"))
    if not program.strip():
        pytest.skip("no code on this page")
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program, encoding="utf-8")
    working = tmp_path / "working"
    working.mkdir()

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=working,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert run.returncode == 0, f"{page.name} fails:\n{run.stdout}\n{run.stderr}"


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
not code
```
## Set-up
```sh
exit 1
```
## After
```python
assert (x, y) == (1, 2)
```
"""
    lines = program_of(page).splitlines()

    assert lines[2] == "x = 1"
    assert lines[6:8] == ["if x:", "    y = 2"]
    assert lines[11] == _SHELL.format(script='echo "$HOME" > file')
    assert lines[21] == "assert (x, y) == (1, 2)"
    assert [number for number, line in enumerate(lines) if line] == [2, 6, 7, 11, 21]
