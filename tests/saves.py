"""Saving with hf_stream and with plain transformers, side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_stream


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def fresh(random_model, name="llama", **changes):
    """A model of one's own to change."""
    source = random_model(name)
    config = type(source.config)(**{**source.config.to_dict(), **changes})
    model = type(source)(config)
    model.load_state_dict(source.state_dict())
    return model


def assert_same_files(model, directory, **arguments):
    model.save_pretrained(directory / "plain", **arguments)
    hf_stream.save_pretrained(model, directory / "ours", **arguments)
    plain = contents(directory / "plain")
    assert contents(directory / "ours") == plain
    return plain


def assert_same_error(model, directory, **arguments):
    with pytest.raises(Exception) as plain:
        model.save_pretrained(directory / "plain", **arguments)
    with pytest.raises(Exception) as ours:
        hf_stream.save_pretrained(model, directory / "ours", **arguments)
    assert type(ours.value) is type(plain.value)
    # Of sets, whose order changes.
    assert sorted(str(ours.value)) == sorted(str(plain.value))
    assert not (directory / "ours").exists()
    return str(ours.value)
