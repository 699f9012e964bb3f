"""The program `hf-stream`, also as `python -m hf_stream`."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line, which sees to interrupts itself once it is there."""
    try:
        from hf_stream.cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(_INTERRUPTED)
    command_line()


if __name__ == "__main__":
    main()
