"""Fold a LoRA adapter into the weights it was trained on, one weight at a time and without a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

import torch

from hf_stream.errors import LayoutError
from hf_stream.layouts.composable import Composable, TwoWay
from hf_stream.layouts.lora_adapter import Factors, LoraAdapter, listed
from hf_stream.layouts.lora_delta import (
    experts_of,
    linear_turns,
    merge_bias,
    merge_convolution,
    merge_embedding,
    merge_linear,
    merge_parameter,
    parameter_turns,
)
from hf_stream.layouts.lora_ties import TiedTensors
from hf_stream.layouts.rule import shape_text
from hf_stream.lazy import materialize

# Elements of an embedding that are compared at a time.
_PIECE = 1 << 20


def merge_lora(
    adapter: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    config: object | None = None,
    *,
    layout: TwoWay | None = None,
    autocast_adapter_dtype: bool = True,
    fan_in_fan_out: bool | None = None,
) -> LoraMerge:
    """Fold a LoRA adapter of PEFT into its base model: `W + B A * scaling` in place of `W`.

    The result equals that of `PeftModel.from_pretrained(base, adapter).merge_and_unload()` on the CPU, bit for bit, for
    a base in the dtypes of its file. Updates of linear layers, of embeddings, of convolutions and of parameters
    (`target_parameters`), DoRA, biases and modules that were trained as a whole are all folded in. Nothing is computed
    before a result is needed; then one weight's update is in memory at a time, and peft need not be installed.

        >>> merge = layouts.merge_lora("adapter")  # doctest: +SKIP
        >>> hf_stream.convert("base", "merged", layout=merge)  # doctest: +SKIP

    Args:
        adapter: The adapter's directory, its safetensors file, or its tensors by name.
        config: The content of adapter_config.json, its path, or a `LoraConfig`. Default: the file beside the tensors.
        layout: From the names and shapes of the base's files to those of the model in memory, on which the adapter was
            trained; undone after merging. Where transformers renames or merges tensors while loading (experts, above
            all), or weights are tied: `from_transformers(...)`.
        autocast_adapter_dtype: As in peft: whether adapters of a half precision base are held in float32.
        fan_in_fan_out: Whether linear layers keep their weights as [in, out]; it only matters for square ones, as the
            shapes of the others tell. Default: as the others of the adapter, or else as its config says.

    Raises:
        CheckpointError, FormatError: The adapter's files are not there, or cannot be read.
        LayoutError: The adapter is of a kind that cannot be merged. When the layout is called: the base lacks a target,
            or shapes do not fit.
    """
    return LoraMerge(LoraAdapter(adapter, config), layout, autocast_adapter_dtype, fan_in_fan_out)


class LoraMerge(Composable):
    """The layout that `merge_lora` gives."""

    def __init__(
        self, adapter: LoraAdapter, layout: TwoWay | None, autocast: bool, fan_in_fan_out: bool | None
    ) -> None:
        self._adapter = adapter
        self._layout = layout
        self._autocast = autocast
        self._fan_in_fan_out = fan_in_fan_out

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._layout is None:
            return self._merge(tensors).tensors
        merged = self._merge(self._layout(tensors))
        result = dict(self._layout.inverse(merged.tensors))
        written = {id(tensor) for tensor in result.values()}
        for name in merged.untied():
            # The way back leaves out one of two weights that a model ties; these are two now.
            if name not in result and id(merged.tensors[name]) not in written:
                result[name] = merged.tensors[name]
        return result

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """An embedding that was trained as a whole is tied to no other any more.

        Raises:
            LayoutError: It may have been tied to one that has no name in the files, and would get lost.
        """
        text = config.get("text_config")
        for part in (config, text if isinstance(text, Mapping) else {}):
            trained = [
                name
                for name, tensor in self._adapter.trained.items()
                if self._adapter.saves_module(name) and tensor.ndim == 2 and tensor.shape[0] == part.get("vocab_size")
            ]
            if trained and config.get("tie_word_embeddings"):
                if len(trained) == 1 and self._layout is None:
                    raise LayoutError(
                        f"'{trained[0]}' was trained as a whole, and the base ties it to another weight; pass "
                        "layout=from_transformers(...), so that this one is written as well"
                    )
                return {**config, "tie_word_embeddings": False}
        return config

    def __repr__(self) -> str:
        through = "" if self._layout is None else f", layout={self._layout!r}"
        return f"merge_lora({self._adapter.name}{through})"

    def _merge(self, base: Mapping[str, torch.Tensor]) -> TiedTensors:
        merged = TiedTensors(base)
        for name, tensor in self._trained(base).items():
            # A module that was trained as a whole is tied no more; an embedding that was saved still is.
            (merged.replace if self._adapter.saves_module(name) else merged.update)(name, tensor)
        targets = self._targets(merged.tensors)
        turns = self._turns(merged.tensors, targets)
        for factors, name, is_parameter in targets:
            weight = merged.tensors[name]
            try:
                scaling = self._scaling(weight, factors, name, is_parameter)
                update = self._updated(weight, factors, scaling, is_parameter, turns.get(name, False))
                if factors.bias is not None:
                    merged.update(*self._bias(merged.tensors, weight, factors, scaling))
            except LayoutError as fact:
                raise LayoutError(f"'{name}': {fact}") from fact.__cause__
            merged.update(name, update)
        return merged

    def _trained(self, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What takes the place of whole tensors of the base."""
        found: dict[str, torch.Tensor] = {}
        missing = []
        for name, tensor in self._adapter.trained.items():
            if name in base:
                if base[name].shape != tensor.shape:
                    raise LayoutError(
                        f"'{name}' has shape {shape_text(base[name])} in the base, {shape_text(tensor)} in "
                        f"{self._adapter.name}; resize the base's embeddings first, and save it"
                    )
                found[name] = tensor.to(base[name].dtype)
            elif self._adapter.saves_module(name):
                found[name] = tensor
            else:
                missing.append(name)
        # A tied weight is in the base under one of its names, and in the adapter under all of them, with one value.
        trained = self._adapter.trained
        missing = [name for name in missing if not any(_equal(trained[name], trained[other]) for other in found)]
        if missing:
            raise self._not_there(missing, base)
        return found

    def _targets(self, base: Mapping[str, torch.Tensor]) -> list[tuple[Factors, str, bool]]:
        """Each update with the name of its weight, and whether that is a parameter rather than a module's weight."""
        modules: dict[str, list[Factors]] = {}
        for factors in self._adapter.factors:
            modules.setdefault(factors.module, []).append(factors)
        parameters: dict[str, list[str]] = {}
        if self._adapter.config.get("target_parameters"):
            for name in filter(self._adapter.targets_parameter, base):
                parameters.setdefault(name.rpartition(".")[0], []).append(name)
        targets: list[tuple[Factors, str, bool]] = []
        missing = []
        for module, wrapped in modules.items():
            weight = f"{module}.weight"
            if module in parameters:
                targets += self._match(module, wrapped, parameters[module], base)
            elif weight in base and len(wrapped) == 1 and not wrapped[0].depth:
                targets.append((wrapped[0], weight, False))
            else:
                missing.append(weight)
        if missing:
            raise self._not_there(missing, base)
        return targets

    def _match(
        self, module: str, wrapped: Sequence[Factors], names: Sequence[str], base: Mapping[str, torch.Tensor]
    ) -> list[tuple[Factors, str, bool]]:
        """Which of a module's parameters each update is for: the files do not say, but ranks and shapes do."""
        fitting = [
            order
            for order in permutations(names)
            if len(order) == len(wrapped)
            and all(self._fits(factors, name, base[name]) for factors, name in zip(wrapped, order, strict=True))
        ]
        if len(fitting) != 1:
            fact = "more than one way" if fitting else "no way"
            raise LayoutError(
                f"'{module}': there is {fact} to match its {len(wrapped)} updates in {self._adapter.name} with the "
                f"parameters {listed(names)} by their shapes; merge it with peft"
            )
        return [(factors, name, True) for factors, name in zip(wrapped, fitting[0], strict=True)]

    def _fits(self, factors: Factors, name: str, weight: torch.Tensor) -> bool:
        if not parameter_turns(weight, factors):
            return False
        try:
            self._adapter.scaling(name, factors.a.shape[0] // experts_of(weight))
        except LayoutError:
            return False
        return True

    def _turns(self, base: Mapping[str, torch.Tensor], targets: Sequence[tuple[Factors, str, bool]]) -> dict[str, bool]:
        """Which weights are [in, out] instead of [out, in]."""
        linear: dict[str, set[bool]] = {}
        experts: dict[str, set[bool]] = {}
        for factors, name, is_parameter in targets:
            weight = base[name]
            if is_parameter:
                experts[name] = parameter_turns(weight, factors)
            elif not factors.embedding and factors.a.ndim == 2:
                linear[name] = linear_turns(weight, factors)
                if not linear[name]:
                    raise LayoutError(
                        f"'{name}' has shape {shape_text(weight)} in the base, which does not fit its update in "
                        f"{self._adapter.name}, {shape_text(factors.b)} by {shape_text(factors.a)}; is it the base "
                        "that the adapter was trained on?"
                    )
        configured = bool(self._adapter.config.get("fan_in_fan_out"))
        return self._decide(linear, configured) | self._decide(experts, False)

    def _decide(self, options: Mapping[str, set[bool]], otherwise: bool) -> dict[str, bool]:
        """Take what shapes say; where they say nothing, what was asked for, or what the other weights say."""
        decided = {next(iter(turns)) for turns in options.values() if len(turns) == 1}
        square = [name for name, turns in options.items() if len(turns) > 1]
        if square and len(decided) > 1 and self._fan_in_fan_out is None:
            raise LayoutError(
                f"{listed(square)}: square weights do not tell whether they are [in, out], and the other weights of "
                "the adapter are of both kinds; pass fan_in_fan_out="
            )
        default = next(iter(decided)) if len(decided) == 1 else otherwise
        if self._fan_in_fan_out is not None:
            default = self._fan_in_fan_out
        return {name: next(iter(turns)) if len(turns) == 1 else default for name, turns in options.items()}

    def _scaling(self, weight: torch.Tensor, factors: Factors, name: str, is_parameter: bool) -> float:
        if is_parameter:
            return self._adapter.scaling(name, factors.a.shape[0] // experts_of(weight))
        return self._adapter.scaling(factors.module, factors.a.shape[0])

    def _updated(
        self, weight: torch.Tensor, factors: Factors, scaling: float, is_parameter: bool, turned: bool
    ) -> torch.Tensor:
        if is_parameter:
            return merge_parameter(weight, factors, scaling, turned=turned, autocast=self._autocast)
        if factors.embedding:
            return merge_embedding(weight, factors, scaling, autocast=self._autocast)
        if factors.a.ndim > 2:
            return merge_convolution(weight, factors, scaling, autocast=self._autocast)
        return merge_linear(weight, factors, scaling, turned=turned, autocast=self._autocast)

    def _bias(
        self, base: Mapping[str, torch.Tensor], weight: torch.Tensor, factors: Factors, scaling: float
    ) -> tuple[str, torch.Tensor]:
        name = f"{factors.module}.bias"
        if name not in base or factors.bias is None:
            raise LayoutError("the adapter has a bias (lora_bias), but the base has none to add it to (nor can peft).")
        return name, merge_bias(base[name], weight, factors.bias, scaling, autocast=self._autocast)

    def _not_there(self, names: Sequence[str], base: Iterable[str]) -> LayoutError:
        return LayoutError(
            f"the base lacks {listed(names)}, which {self._adapter.name} changes; the base has {listed(base)}. If "
            "transformers loads it under other names, or ties it to another weight, pass layout=from_transformers(...)"
        )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two embeddings are one; they are read, a few rows at a time."""
    if a.ndim != 2 or a.shape != b.shape or a.dtype != b.dtype:
        return False
    step = max(1, _PIECE // max(1, a.shape[1]))
    rows = (slice(start, start + step) for start in range(0, a.shape[0], step))
    return all(torch.equal(*materialize([a[part], b[part]])) for part in rows)
