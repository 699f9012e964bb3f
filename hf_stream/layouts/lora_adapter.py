"""A LoRA adapter as PEFT saves it: what its config asks for, and its tensors sorted by what they do to the base."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_stream.checkpoint import open_checkpoint
from hf_stream.checkpoint.paths import given_path
from hf_stream.errors import LayoutError, MissingError
from hf_stream.formats.regular_files import read_json_object
from hf_stream.lazy import LazyTensor

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_WRAPPER = ".base_layer"
_WRAPPERS = re.compile(r"(\.base_layer)+\.")
_PART = re.compile(
    r"(?P<module>.+)\."
    r"(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:(?<=vector)\.weight)?"
)
# Copies that `bias="all"` saves once more, of what is there under the name that counts.
_COPIES = (".original_module.", ".modules_to_save.")

# Ways of starting that leave the base as it was: the others put something else in its place, which is not saved.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_OTHER_METHODS = {
    "layer_replication": "repeats layers",
    "use_qalora": "is QALoRA",
    "use_bdlora": "is BD-LoRA",
    "velora_config": "is VeLoRA",
    "monteclora_config": "is MonteCLoRA",
    "kasa_config": "is KaSA",
    "arrow_config": "is an Arrow router",
    "alora_invocation_tokens": "is an activated LoRA, which works on some tokens only",
    "megatron_config": "is for Megatron's layers",
    "trainable_token_indices": "trains single tokens",
    "target_modules_to_tie": "has tied targets",
}


@dataclass(frozen=True)
class Factors:
    """What an adapter has for one module, or for one parameter of it. r rank, E experts.

    Attributes:
        module: The module's name in the base model.
        depth: How many wrappers of other parameters of the module are around this one's.
        a: [r, in]; of an embedding [r, entries]; of a convolution [r, in, ...]; of a parameter [r E, in].
        b: [out, r]; of a convolution [out, r, 1, ...]; of a parameter [out, r E].
        embedding: Whether the module is an embedding.
        bias: [out], or None.
        magnitude: DoRA's magnitudes, or None.
    """

    module: str
    depth: int
    a: torch.Tensor
    b: torch.Tensor
    embedding: bool
    bias: torch.Tensor | None
    magnitude: torch.Tensor | None


class LoraAdapter:
    """An adapter's config and tensors; nothing but headers is read.

    Args:
        source: The adapter's directory, its safetensors file, or its tensors by name.
        config: The content of adapter_config.json, its path, or a `LoraConfig`. Default: the file beside the tensors.

    Attributes:
        factors: Low-rank updates, embeddings first.
        trained: Whole tensors that replace the base model's, by their names there.

    Raises:
        CheckpointError, FormatError: The files are not there, or cannot be read.
        LayoutError: The adapter is not one that a sum of base and low-rank update stands for.
    """

    def __init__(
        self, source: str | os.PathLike[str] | Mapping[str, torch.Tensor], config: object | None = None
    ) -> None:
        if isinstance(source, Mapping):
            if config is None:
                raise LayoutError("an adapter given as tensors needs config=, the content of its adapter_config.json")
            self.name, tensors = "the adapter", source
        else:
            self.name = f"'{os.fspath(source)}'"
            path = given_path(source)
            file = path / WEIGHTS_FILE if path.is_dir() else path
            if not file.exists():
                raise MissingError(
                    f"'{file}' does not exist; pass the directory of an adapter in safetensors (one that was saved as "
                    "a pickle can be saved anew by peft)"
                )
            tensors = open_checkpoint(file)
            config = file.parent / CONFIG_FILE if config is None else config
        self.config = _read_config(config)
        self._check_config()
        self.factors, self.trained = self._sort(tensors)
        # Embeddings first, as in a model: where two targets share a weight, they are added in this order.
        self.factors.sort(key=lambda factors: not factors.embedding)

    def scaling(self, key: str, rank: int) -> float:
        """The factor of the update of the module or parameter `key`.

        Raises:
            LayoutError: The config gives it another rank than its tensors have.
        """
        wanted = self._of_pattern("rank_pattern", key, self.config["r"])
        if rank != wanted:
            raise LayoutError(
                f"'{key}' has rank {rank} in {self.name}, but {wanted} according to its config; "
                "use the config that was saved with it"
            )
        alpha: float = self._of_pattern("alpha_pattern", key, self.config["lora_alpha"])
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def targets_parameter(self, name: str) -> bool:
        """Whether a tensor of the base is a target in itself, and not as the weight of a module."""
        targets: Sequence[str] = self.config.get("target_parameters") or ()
        return any(name == target or name.endswith(f".{target}") for target in targets)

    def saves_module(self, name: str) -> bool:
        """Whether a tensor belongs to a module that was trained as a whole."""
        modules: Sequence[str] = self.config.get("modules_to_save") or ()
        owner = name.rpartition(".")[0]
        return any(owner.endswith(module) or f"{module}." in f"{owner}." for module in modules)

    def _of_pattern(self, field: str, key: str, default: Any) -> Any:
        patterns: Mapping[str, Any] = self.config.get(field) or {}
        for pattern, value in patterns.items():
            try:
                found = re.match(rf"(.*\.)?({pattern})$", key)
            except re.error as error:
                raise LayoutError(f"{self.name}: {field} '{pattern}' is not a regular expression: {error}") from error
            if found:
                return value
        return default

    def _check_config(self) -> None:
        config = self.config
        if config.get("peft_type") != "LORA":
            raise LayoutError(f"{self.name} is of type {config.get('peft_type')}; only LORA can be merged here")
        for field in ("r", "lora_alpha"):
            if not isinstance(config.get(field), int | float):
                raise LayoutError(f"{self.name}: the config has no number '{field}', got {config.get(field)!r}")
        start = config.get("init_lora_weights", True)
        if start not in _PLAIN_STARTS:
            raise LayoutError(
                f"{self.name} was started with init_lora_weights='{start}', which changes the base weights as well; "
                "save it with path_initial_model_for_weight_conversion=, which makes it an ordinary adapter"
            )
        for field, what in _OTHER_METHODS.items():
            if config.get(field):
                raise LayoutError(f"{self.name} {what} ({field}); merge it with peft")

    def _sort(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Factors], dict[str, torch.Tensor]]:
        modules: dict[str, dict[str, torch.Tensor]] = {}
        trained: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            name = key.removeprefix(_PREFIX)
            found = _PART.fullmatch(name)
            # Lazily, so that no update is worked out before its turn comes.
            lazy = LazyTensor.from_tensor(tensor)
            if found:
                modules.setdefault(found["module"], {})[found["part"]] = lazy
            elif not any(copy in f".{name}" for copy in _COPIES):
                trained[_WRAPPERS.sub(".", f".{name}")[1:]] = lazy
        return [self._factors(module, parts) for module, parts in modules.items()], trained

    def _factors(self, path: str, parts: Mapping[str, torch.Tensor]) -> Factors:
        embedding = "lora_embedding_A" in parts
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        missing = [name for name in names if name not in parts]
        if missing:
            raise LayoutError(f"{self.name} lacks '{_PREFIX}{path}.{missing[0]}'; save the adapter again")
        module, depth = path, 0
        while module.endswith(_WRAPPER):
            module, depth = module.removesuffix(_WRAPPER), depth + 1
        magnitude = parts.get("lora_magnitude_vector")
        if bool(self.config.get("use_dora")) != (magnitude is not None):
            fact = "has no magnitudes of DoRA" if magnitude is None else "has magnitudes of DoRA"
            raise LayoutError(f"'{path}' {fact} in {self.name}, unlike its config says; use the config saved with it")
        return Factors(module, depth, parts[names[0]], parts[names[1]], embedding, parts.get("lora_B.bias"), magnitude)


def _read_config(config: object) -> dict[str, Any]:
    """The content of an adapter's config, whichever way it is given."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str | os.PathLike):
        path = given_path(config)
        if not path.exists():
            raise MissingError(f"'{path}' does not exist; pass config=, which says how the adapter works")
        return read_json_object(path)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise LayoutError(f"config= must be a LoraConfig, its content or a path, got {type(config).__name__}")
    content = dict(to_dict())
    # Some texts of the config are enumerations in memory.
    return {key: getattr(value, "value", value) for key, value in content.items()}


def listed(names: Iterable[str]) -> str:
    """A few names, for an error message."""
    quoted = [f"'{name}'" for name in names]
    return ", ".join(quoted[:3]) + (f" and {len(quoted) - 3} more" if len(quoted) > 3 else "")
