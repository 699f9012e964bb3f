"""`hf-stream env`: versions for a bug report, without importing what they are of."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version

import hf_stream


def test_it_prints_what_a_bug_report_needs_and_imports_none_of_it() -> None:
    program = (
        "import sys\nfrom hf_stream.cli import main\nmain(['env'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()\n"
    )
    environment = {**os.environ, "HF_STREAM_DURABLE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment, timeout=120
    )
    facts = dict(line.removeprefix("- ").split(": ", 1) for line in run.stdout.splitlines())
    assert facts["hf_stream"] == hf_stream.__version__
    assert facts["Python"] == platform.python_version()
    assert facts["torch"] == version("torch")
    assert facts["transformers"] == version("transformers")
    assert facts["HF_STREAM_DURABLE"] == "0"
