"""docs/command-line.md, read from top to bottom: its commands print what the page says they print.

A `text` block right after a `bash` block is what the commands in it write to stdout, to the letter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
_BLOCK = re.compile(
    r"^```(?P<language>python|bash)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)


def test_commands_print_what_the_page_says(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python: list[str] = []
    outputs = 0
    for block in _BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["language"] == "python":
            # Blocks build on the imports of earlier ones, but not on their effects.
            python += [
                line for line in block["code"].splitlines(keepends=True) if line.startswith(("import ", "from "))
            ]
            command = [sys.executable, "-c", "".join(python) + block["code"]]
        else:
            command = ["bash", "-euo", "pipefail", "-c", block["code"]]

        run = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

        assert run.returncode == 0, f"{block['code']}\n{run.stderr}"
        if block["output"] is not None:
            assert run.stdout == block["output"], f"after\n{block['code']}"
            outputs += 1
    assert outputs == len(re.findall(r"^```text$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) > 0
