"""Runs the command line as `python -m hf_stream`."""

from __future__ import annotations

from hf_stream.cli import main

main()
