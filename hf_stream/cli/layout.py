"""From `--layout` and `--inverse` to one layout, with errors that name the word on the command line."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from hf_stream import layouts
from hf_stream.checkpoint import AnyLayout
from hf_stream.checkpoint.config import config_beside, config_of
from hf_stream.checkpoint.mapping import FileFormat, check_files, config_after, file_format_of, map_tensors
from hf_stream.checkpoint.matches import Matches
from hf_stream.checkpoint.paths import given_path
from hf_stream.errors import HfStreamError, LayoutError
from hf_stream.layouts.registry import takes_path

Tensors = Mapping[str, torch.Tensor]


def chosen_layout(
    specs: Sequence[str], inverse: bool, source: str, config: str | None = None, scope: str | None = None
) -> AnyLayout | None:
    """The layouts of a command line, one after the other; None without any.

    Args:
        specs: Names of ready-made layouts, or `path/to/file.py:name`.
        inverse: Whether to undo them, the last one first.
        source: The checkpoint, beside which its config lies.
        config: The path of another config.
        scope: The part of the model that they are for: what its names begin with, and after "=" what they shall begin
            with.

    Raises:
        LayoutError: A layout is not there, or has no inverse; also when the result is called and does not fit.
    """
    if not specs:
        for option, given in (("inverse", inverse), ("config", config), ("scope", scope)):
            if given:
                raise click.UsageError(
                    f"--{option} has no meaning without a layout: give --layout as well.", click.get_current_context()
                )
        return None
    content = config_beside(given_path(source)) if config is None else config_of(config)
    steps = [(spec, _find(spec, content, source)) for spec in specs]
    if scope is not None:
        steps = _scoped(steps, scope)
    if inverse:
        steps = [(spec, _inverse(spec, layout)) for spec, layout in reversed(steps)]
    return _Steps(steps, None if content is not None else _without_config(source))


def refuse_unmatched(matches: Matches, allow: bool) -> None:
    """Fail where a rule has found nothing, unless that is allowed.

    Raises:
        LayoutError: A rule has found nothing.
    """
    problem = matches.problem()
    if problem is not None and not allow:
        raise LayoutError(f"{problem} --allow-unmatched goes on with a warning.")


@dataclass(frozen=True)
class _Steps:
    """Layouts one after the other, each with the word that stands for it."""

    steps: Sequence[tuple[str, AnyLayout]]
    no_config: str | None

    def __call__(self, tensors: Tensors) -> Tensors:
        return self.with_matches(tensors)[0]

    def with_matches(self, tensors: Tensors) -> tuple[Tensors, Matches]:
        matches = Matches()
        for spec, step in self.steps:
            tensors, found = _apply(spec, step, tensors, self.no_config)
            rules = tuple(replace(entry, rule=f"{spec}: {entry.rule}") for entry in found.rules)
            matches = matches.then(replace(found, rules=rules))
        return tensors, matches

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        for _, step in self.steps:
            config = config_after(step, config)
        return config

    @property
    def file_format(self) -> FileFormat:
        return file_format_of(self.steps[-1][1])

    def check_files(self, tensors: Tensors) -> None:
        check_files(self.steps[-1][1], tensors)


def _scoped(steps: Sequence[tuple[str, AnyLayout]], scope: str) -> list[tuple[str, AnyLayout]]:
    """Layouts for a part of the model; only the last one gives its names their new beginning."""
    src, equals, dst = scope.partition("=")
    moved = dst if equals else src
    scoped = [
        (spec, _scopable(spec, layout).scoped(src, moved if number == len(steps) else src))
        for number, (spec, layout) in enumerate(steps, 1)
    ]
    return list(scoped)


def _scopable(spec: str, layout: AnyLayout) -> layouts.Layout | layouts.Composable:
    if not isinstance(layout, layouts.Layout | layouts.Composable):
        raise LayoutError(f"layout '{spec}' is a function and takes no --scope; write it as a Layout of rules")
    return layout


def _is_file(spec: str) -> bool:
    return (":" in spec or spec.endswith(".py")) and not takes_path(spec)


def _find(spec: str, config: object, source: str) -> AnyLayout:
    if _is_file(spec):
        try:
            return layouts.load(spec, config)
        except HfStreamError:
            raise
        except (Exception, SystemExit) as error:
            raise _failure(spec, error) from error
    try:
        return layouts.get(spec, config)
    except LayoutError as error:
        if config is None and (spec in layouts.names() or takes_path(spec)):
            raise LayoutError(f"{error} {_without_config(source)}") from error
        raise


def _inverse(spec: str, layout: AnyLayout) -> AnyLayout:
    try:
        inverse: object = getattr(layout, "inverse", None)
    except LayoutError as error:
        raise _failure(spec, error) from error
    if not callable(inverse):
        raise LayoutError(f"layout '{spec}' is a function and has no inverse; write it as a Layout of rules")
    return inverse


def _without_config(source: str) -> str:
    return f"(There is no config.json beside '{source}' to read sizes from; --config PATH names one.)"


def _apply(spec: str, layout: AnyLayout, tensors: Tensors, no_config: str | None) -> tuple[Tensors, Matches]:
    try:
        return map_tensors(layout, tensors)
    except LayoutError as error:
        note = f" {no_config}" if no_config is not None and getattr(layout, "needs_config", False) else ""
        raise LayoutError(f"{_failure(spec, error)}{note}") from error
    except (Exception, SystemExit) as error:
        if _is_file(spec) or isinstance(error, HfStreamError):
            raise _failure(spec, error) from error
        raise


def _failure(spec: str, error: BaseException) -> LayoutError:
    """What went wrong in a layout, and where in the user's file."""
    text = str(error) if isinstance(error, HfStreamError) else f"{type(error).__name__}: {error}"
    path = str(Path(spec.rpartition(":")[0]))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f", line {lines[-1]}" if lines else ""
    return LayoutError(f"layout '{spec}'{place}: {text}")
