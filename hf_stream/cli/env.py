"""`hf-stream env`: what a bug report should say about the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click

import hf_stream

_PACKAGES = ("torch", "safetensors", "transformers", "huggingface_hub", "accelerate", "peft", "numpy")
_VARIABLES = ("HF_STREAM_DURABLE", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS")


@click.command()
def env() -> None:
    """Print versions and the platform, for a bug report."""
    facts = {
        "hf_stream": hf_stream.__version__,
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        **{package: _version(package) for package in _PACKAGES},
        **{variable: os.environ[variable] for variable in _VARIABLES if variable in os.environ},
    }
    for name, fact in facts.items():
        click.echo(f"- {name}: {fact}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
