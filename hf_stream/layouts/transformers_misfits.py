"""What of a checkpoint does not fit a model of transformers, in words that name both sides."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence, Set

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, rename_source_key

from hf_stream.errors import LayoutError
from hf_stream.layouts.transformers_engine import revert

_LISTED = 5
# Names that are looked through for one that resembles a wrong one.
_CANDIDATES = 2000

Tensors = Mapping[str, torch.Tensor]


class Misfits:
    """What does not fit, collected first and told at once.

    Args:
        model: The model, on the meta device, or with what was loaded in place.
        slots: Its weights on the meta device, by name.
        tensors: What it was given.
    """

    def __init__(self, model: PreTrainedModel, slots: Tensors, tensors: Tensors) -> None:
        self._model, self._slots, self._tensors = model, slots, tensors
        self._facts: list[str] = []

    def add_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Weights that came out in another shape."""
        for name in self._in_order(shapes):
            want, got = list(self._slots[name].shape), list(shapes[name])
            self._facts.append(f"'{name}': the model wants shape {want}, got {got}{self._lacking(name)}")

    def add_errors(self, errors: Mapping[str, str]) -> None:
        """Weights whose conversion failed, with what transformers reports: a traceback, the message, and where."""
        for name, report in errors.items():
            message = report.rpartition("\nError")[0].rpartition("\n")[2].rstrip(".")
            # What is not there explains more than sizes that do not match.
            self._facts.append(f"'{name}' cannot be built{self._lacking(name) or f': {message}'}")

    def add_missing(self, names: Collection[str]) -> None:
        """Weights that came out of nothing."""
        for name in self._in_order(names):
            self._facts.append(f"'{name}' is missing{self._lacking(name)}")

    def add_unexpected(self, names: Set[str], conversions: Sequence[WeightTransform] = ()) -> None:
        """Names, after all renamings, that the model does not have."""
        given = {} if names <= self._tensors.keys() else self._renamed(conversions)
        for name in sorted(names):
            written = given.get(name, name)
            here = f" ('{name}' in memory)" if written != name else ""
            close = difflib.get_close_matches(name, list(self._slots)[:_CANDIDATES], n=1)
            nearest = f"; the nearest name that it has is '{close[0]}'" if close else ""
            self._facts.append(f"'{written}'{here} is not in the model{nearest}")

    def check(self) -> None:
        """Raise what was found, if anything.

        Raises:
            LayoutError: Something does not fit.
        """
        if self._facts:
            more = f"; and {len(self._facts) - _LISTED} more" if len(self._facts) > _LISTED else ""
            count = f"{len(self._facts)} misfit{'s' if len(self._facts) > 1 else ''}"
            raise LayoutError(
                f"{count} with {type(self._model).__name__}: {'; '.join(self._facts[:_LISTED])}{more}. "
                "Use the config that belongs to the checkpoint, put a layout before that maps its names, or "
                "pass strict=False to go without names that are missing or left over."
            )

    def _in_order(self, names: Collection[str]) -> list[str]:
        return [name for name in self._slots if name in names]

    def _lacking(self, name: str) -> str:
        """Those tensors of a checkpoint which the weight is made of and which are not there."""
        if len(self._facts) >= _LISTED:
            return ""  # nobody will read it
        try:
            parts = revert(self._model, {name: self._slots[name]})
        except (KeyError, ValueError, RuntimeError):
            return ""  # it takes others as well to say
        absent = [part for part in parts if part not in self._tensors and part != name]
        if not absent:
            return ""
        listed = ", ".join(f"'{part}'" for part in absent[:2])
        return f" (the checkpoint has no {listed}{f' and {len(absent) - 2} more' if len(absent) > 2 else ''})"

    def _renamed(self, conversions: Sequence[WeightTransform]) -> dict[str, str]:
        """Name in memory -> name as given."""
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        slots, prefix = dict(self._slots), self._model.base_model_prefix
        return {rename_source_key(name, renamings, converters, prefix, slots)[0]: name for name in self._tensors}
