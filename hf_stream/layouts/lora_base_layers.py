"""Names of a base model's tensors, and of the same tensors in a model that PEFT has wrapped; nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_stream.errors import LayoutError
from hf_stream.layouts.composable import Composable

_PREFIX = "base_model.model."
_ADAPTER_PART = re.compile(r"\.(lora_[^.]+|modules_to_save)\.")
_WRAPPERS = re.compile(r"(\.base_layer|\.original_module)+\.")
_LAYER_NUMBER = r".*?\.[^.]*\.(?P<number>\d+)\."


def lora_base_layers(
    targets: object,
    *,
    modules_to_save: Sequence[str] = (),
    target_parameters: Sequence[str] = (),
    adapter: str = "default",
) -> Composable:
    """Give a base model's tensors the names that they have once PEFT has wrapped the model, and back.

        layers.0.q_proj.weight  ->  base_model.model.layers.0.q_proj.base_layer.weight  (a target)
        layers.0.norm.weight    ->  base_model.model.layers.0.norm.weight
        lm_head.weight          ->  base_model.model.lm_head.original_module.weight  (one of modules_to_save)
                                    base_model.model.lm_head.modules_to_save.default.weight

        >>> wrap = lora_base_layers(["q_proj"])
        >>> list(wrap({"layers.0.q_proj.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}))
        ['base_model.model.layers.0.q_proj.base_layer.weight', 'base_model.model.norm.weight']

    The inverse gives the base model's own tensors, and leaves out what belongs to adapters.

    Args:
        targets: What is wrapped: a `PeftModel`, whose modules say it exactly; a `LoraConfig`, or its content; or, as
            `target_modules` in peft, ends of the modules' names, or a regular expression for whole names.
        modules_to_save: As in peft: ends of the names of modules that are trained as a whole. A config has its own.
        target_parameters: As in peft: ends of the names of parameters that are targets in themselves. A config has its
            own.
        adapter: What the adapter is called, whose copies of `modules_to_save` are filled as well. A model's are not.

    Raises:
        LayoutError: The targets are none that names alone can tell.
    """
    if isinstance(targets, nn.Module):
        return WrappedModel({slot.name: slot.plain for slot in base_slots(targets) if slot.persistent})
    if not isinstance(targets, str) and (isinstance(targets, Mapping) or hasattr(targets, "to_dict")):
        config = dict(targets) if isinstance(targets, Mapping) else dict(targets.to_dict())
    else:
        config = {"target_modules": targets}
        config |= {"modules_to_save": modules_to_save, "target_parameters": target_parameters}
    return WrappedNames(_Targets.of(config), adapter)


class BaseSlot(NamedTuple):
    """Where a wrapped model holds a tensor of its base model.

    Attributes:
        name: The tensor's name in the wrapped model.
        plain: Its name in the base model.
        owner: The module that has it, under the last part of the name.
        persistent: Whether it is in the state dict.
    """

    name: str
    plain: str
    owner: nn.Module
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found: torch.Tensor = getattr(self.owner, self.name.rpartition(".")[2])
        return found


def base_slots(model: nn.Module) -> Iterator[BaseSlot]:
    """The base model's tensors in a `PeftModel`, tied ones under each of their names; adapters' tensors are left out.

    Raises:
        LayoutError: It is no `PeftModel`.
    """
    if not hasattr(model, "peft_config") or not isinstance(getattr(model, "base_model", None), nn.Module):
        raise LayoutError(f"a PeftModel is wanted, or names of targets, got {type(model).__name__}")
    tuner: Any = model.base_model
    if getattr(model, "_is_prompt_learning", False):
        return _slots(tuner, "base_model.", "")
    return _slots(tuner.model, _PREFIX, "")


def _slots(module: nn.Module, path: str, plain: str) -> Iterator[BaseSlot]:
    children = module._modules
    if hasattr(type(module), "get_base_layer"):  # a layer of a PEFT method
        yield from _inside(children.get("base_layer"), f"{path}base_layer.", plain)
    elif hasattr(type(module), "unload_and_optionally_merge_module"):  # a module that is trained as a whole, or in part
        for name in ("original_module", "token_adapter"):
            yield from _inside(children.get(name), f"{path}{name}.", plain)
    else:
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    persistent = name not in module._non_persistent_buffers_set
                    yield BaseSlot(path + name, plain + name, module, persistent)
        for name, child in children.items():
            yield from _inside(child, f"{path}{name}.", f"{plain}{name}.")


def _inside(module: nn.Module | None, path: str, plain: str) -> Iterator[BaseSlot]:
    return iter(()) if module is None else _slots(module, path, plain)


@dataclass(frozen=True, repr=False)
class WrappedModel(Composable):
    """The layout for a given model; names that its base model lacks get the prefix, and are for others to refuse.

    Attributes:
        plain_of: Each name in the wrapped model, with that in the base model.
    """

    plain_of: Mapping[str, str]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name_of = {plain: name for name, plain in self.plain_of.items()}
        return {name_of.get(name, _PREFIX + name): tensor for name, tensor in tensors.items()}

    @property
    def inverse(self) -> BaseOfModel:
        return BaseOfModel(self.plain_of)

    def __repr__(self) -> str:
        return f"lora_base_layers(<model with {len(self.plain_of)} base tensors>)"


@dataclass(frozen=True, repr=False)
class BaseOfModel(Composable):
    """The inverse of `WrappedModel`."""

    plain_of: Mapping[str, str]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self.plain_of[name]: tensor for name, tensor in tensors.items() if name in self.plain_of}

    @property
    def inverse(self) -> WrappedModel:
        return WrappedModel(self.plain_of)

    def __repr__(self) -> str:
        return f"lora_base_layers(<model with {len(self.plain_of)} base tensors>).inverse"


@dataclass(frozen=True, repr=False)
class WrappedNames(Composable):
    """The layout for targets that are known by name."""

    targets: _Targets
    adapter: str

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wrappers = self.targets.parameters(tensors)
        result: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            for wrapped in self._names(name, wrappers):
                result[_PREFIX + wrapped] = tensor
        return result

    def _names(self, name: str, wrappers: Mapping[str, int]) -> list[str]:
        module, _, leaf = name.rpartition(".")
        saved = self.targets.saved_part(module)
        if saved is not None:
            rest = name.removeprefix(f"{saved}.")
            return [f"{saved}.original_module.{rest}", f"{saved}.modules_to_save.{self.adapter}.{rest}"]
        depth = wrappers.get(module) or int(self.targets.module(module))
        return [".".join([*filter(None, [module]), *["base_layer"] * depth, leaf])]

    @property
    def inverse(self) -> BaseNames:
        return BaseNames(self.targets, self.adapter)

    def __repr__(self) -> str:
        return f"lora_base_layers({self.targets.modules!r})"


@dataclass(frozen=True, repr=False)
class BaseNames(Composable):
    """The inverse of `WrappedNames`."""

    targets: _Targets
    adapter: str

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {}
        for name, tensor in tensors.items():
            if not _ADAPTER_PART.search(f".{name}"):
                result[_WRAPPERS.sub(".", f".{name.removeprefix(_PREFIX)}")[1:]] = tensor
        return result

    @property
    def inverse(self) -> WrappedNames:
        return WrappedNames(self.targets, self.adapter)

    def __repr__(self) -> str:
        return f"lora_base_layers({self.targets.modules!r}).inverse"


@dataclass(frozen=True)
class _Targets:
    """What PEFT wraps, told by names as PEFT tells it."""

    modules: str | tuple[str, ...]
    saved: tuple[str, ...]
    wrapped_parameters: tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layer_patterns: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Targets:
        modules = config.get("target_modules")
        parameters = _texts(config.get("target_parameters"))
        if modules is None and not parameters:
            raise LayoutError(
                "no target_modules: peft has defaults for them by architecture; name them, or pass the model"
            )
        if isinstance(modules, str) and modules.lower() == "all-linear":
            raise LayoutError("target_modules='all-linear' is not told by names; pass the model that peft has wrapped")
        layers = config.get("layers_to_transform")
        excluded = config.get("exclude_modules")
        return cls(
            modules=modules if isinstance(modules, str) else _texts(modules),
            saved=_texts(config.get("modules_to_save")),
            wrapped_parameters=parameters,
            excluded=excluded if isinstance(excluded, str) else _texts(excluded),
            layers=(layers,) if isinstance(layers, int) else tuple(layers) if layers else None,
            layer_patterns=_texts(config.get("layers_pattern")),
        )

    def module(self, name: str) -> bool:
        """Whether a module is wrapped."""
        if _named(self.excluded, name):
            return False
        if isinstance(self.modules, str) or self.layers is None or name in self.modules:
            return _named(self.modules, name)
        return _named(self.modules, name) and self._layer(name) in self.layers

    def parameters(self, names: Iterable[str]) -> dict[str, int]:
        """How many wrappers are around each module of which parameters are targets in themselves."""
        found: dict[str, int] = {}
        for name in names if self.wrapped_parameters else ():
            if _named(self.wrapped_parameters, name):
                module = name.rpartition(".")[0]
                found[module] = found.get(module, 0) + 1
        return found

    def saved_part(self, module: str) -> str | None:
        """The module that is trained as a whole and holds this one, or is it."""
        parts = module.split(".")
        ancestors = (".".join(parts[: n + 1]) for n in range(len(parts)))
        return next((name for name in ancestors if any(map(name.endswith, self.saved))), None)

    def _layer(self, name: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\." for pattern in self.layer_patterns] or [_LAYER_NUMBER]
        found = next(filter(None, (re.match(pattern, name) for pattern in patterns)), None)
        return None if found is None else int(found["number"])


def _named(targets: str | tuple[str, ...], name: str) -> bool:
    """Whether a name is one of these, or ends like one; or fits them all, as a regular expression."""
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, name) is not None
        except re.error as error:
            raise LayoutError(f"'{targets}' is not a regular expression: {error}") from error
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())
