"""FP8 weights with a scale for each block (DeepSeek and others) as ordinary weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hf_stream.checkpoint.matches import Matches, RuleMatches
from hf_stream.errors import LayoutError
from hf_stream.layouts.composable import Composable, Counting
from hf_stream.layouts.sizes import fp8_scales
from hf_stream.lazy import defer

# Elements of a weight that are read and held at a time, and those among them that are in float32 at a time.
_PIECE = 1 << 24
_STEP = 1 << 19
# A block where one scale holds for all: any size does.
_ANY = 128

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# What belongs to the arithmetic in FP8 and not to a weight: scales of inputs, outputs, and cached keys and values.
_OF_ACTIVATIONS = re.compile(r"(.*[._])?(activation|input|output|[qkv])_scale(_inv)?", re.DOTALL)
_SUFFIXES = ("_scale_inv", "_scale")


def dequantize_fp8_blocks(
    block_size: tuple[int, int] | Literal["config"] | None = "config",
    dtype: torch.dtype = torch.bfloat16,
    *,
    suffix: str | None = None,
) -> Composable:
    """FP8 weights times the scales of their blocks: `x.weight` and `x.weight_scale_inv` become `x.weight`.

    Each element is multiplied by its block's scale in float32 and rounded once, to `dtype`: what transformers and
    DeepSeek's own code give, bit for bit. Weights [rows, cols] have scales [rows / 128, cols / 128], rounded up, and
    stacked experts [experts, rows, cols] have [experts, rows / 128, cols / 128]. A weight may have a single scale as
    well, or one for each row [rows, 1]. Scales are dropped, also those of the same modules' activations
    (`x.input_scale`); all other tensors pass through.

    Weights are read piece by piece, so that some 60 MB are held, however large they are. There is no inverse. `convert`
    takes the quantization out of config.json, so that what it writes loads as an ordinary model.

        >>> quantized = {
        ...     "up.weight": torch.ones(256, 192).to(torch.float8_e4m3fn),
        ...     "up.weight_scale_inv": torch.tensor([[0.5, 2.0], [4.0, 8.0]]),
        ... }
        >>> dequantize_fp8_blocks()(quantized)["up.weight"][::128, ::128]
        tensor([[0.5000, 2.0000],
                [4.0000, 8.0000]], dtype=torch.bfloat16)

    Args:
        block_size: Rows and columns of a block. None: the scales of each weight divide it evenly, as many as they are.
            "config": what the config beside the checkpoint, or that of the model, says; else (128, 128).
        dtype: What the weights become.
        suffix: What the name of a scale has after the name of its weight: "_scale" for compressed-tensors, fbgemm and
            ModelOpt. Default: what the config says, else "_scale_inv".
    """
    layout = _AsTheConfigSays(block_size, dtype, suffix)
    return layout.with_config(None) if block_size != "config" and suffix is not None else layout


@dataclass(frozen=True, repr=False)
class _AsTheConfigSays(Counting):
    """What `dequantize_fp8_blocks` gives until the config is known."""

    block_size: tuple[int, int] | Literal["config"] | None
    dtype: torch.dtype
    suffix: str | None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size != "config":
            object.__setattr__(self, "block_size", tuple(self.block_size))  # a config has it as a list
        self.with_config(None)

    @property
    def needs_config(self) -> bool:
        return True

    def with_config(self, config: object) -> DequantizeFp8Blocks:
        block_size, suffix = fp8_scales(config)
        if self.block_size != "config":
            block_size = self.block_size
        return DequantizeFp8Blocks(block_size, self.dtype, self.suffix or suffix)

    def with_matches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, torch.Tensor], Matches]:
        return self.with_config(None).with_matches(tensors)

    def new_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.with_config(None).new_config(config)

    def __repr__(self) -> str:
        suffix = "" if self.suffix is None else f", suffix={self.suffix!r}"
        return f"dequantize_fp8_blocks({self.block_size!r}, {self.dtype}{suffix})"


@dataclass(frozen=True, repr=False)
class DequantizeFp8Blocks(Counting):
    """What `dequantize_fp8_blocks` gives."""

    block_size: tuple[int, int] | None
    dtype: torch.dtype
    suffix: str

    def __post_init__(self) -> None:
        if self.block_size is not None:
            # A config has it as a list.
            object.__setattr__(self, "block_size", tuple(self.block_size))
        if self.block_size is not None and (len(self.block_size) != 2 or min(self.block_size) < 1):
            raise LayoutError(f"block_size must be two positive numbers, got {self.block_size}.")
        if not self.dtype.is_floating_point or self.dtype.itemsize < 2:
            raise LayoutError(f"weights cannot be dequantized to {self.dtype}. Pass dtype=torch.bfloat16 or another.")

    def with_matches(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Matches]:
        """The tensors, FP8 weights as `dtype`, and how many of these there were.

        Raises:
            LayoutError: A weight has no scale or a scale no weight, or their shapes do not go together.
        """
        scaled = {name for name in tensors if name + self.suffix in tensors}
        modules = {name.rpartition(".")[0] for name in scaled}
        # Scales of cached keys and values are beside the projections.
        modules |= {name.rpartition(".")[0] for name in modules}
        results = {}
        for name, tensor in tensors.items():
            if name in scaled:
                try:
                    results[name] = self._dequantized(tensor, tensors[name + self.suffix])
                except LayoutError as fact:
                    raise LayoutError(f"'{name}': {fact}") from None
            elif tensor.dtype in _FP8:
                raise LayoutError(
                    f"'{name}' is {tensor.dtype}, and its scale '{name}{self.suffix}' is missing. "
                    f"{_remedy(name, tensors)}"
                )
            elif not self._is_scale(name, scaled, modules):
                results[name] = tensor
        problem = "" if scaled else f"no weight is FP8 or has a scale, such as 'x.weight{self.suffix}', beside it"
        return results, Matches.of([RuleMatches(repr(self), len(scaled), problem)], tensors)

    def _is_scale(self, name: str, scaled: Set[str], modules: Set[str]) -> bool:
        """Whether a tensor goes with the weights that it belongs to, and not on by itself as `logit_scale` does."""
        weight = name.removesuffix(self.suffix)
        if weight in scaled:
            return weight != name
        if name.rpartition(".")[0] in modules and _OF_ACTIVATIONS.fullmatch(name):
            return True
        if weight != name and (self.suffix == "_scale_inv" or weight.endswith("weight")):
            raise LayoutError(f"'{name}' scales '{weight}', which is missing. Add it, or drop the scale.")
        return False

    def new_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config without quantization, and so the configs in it."""
        return {
            key: self.new_config(entry) if key.endswith("_config") and isinstance(entry, Mapping) else entry
            for key, entry in config.items()
            if key not in ("quantization_config", "compression_config")
        }

    def _dequantized(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[..., rows, cols] with scales for [..., row blocks, column blocks]."""
        if weight.dtype not in _FP8:
            raise LayoutError(f"{weight.dtype} with a scale; only FP8 weights can be dequantized.")
        if weight.dim() > 2:
            if scale.numel() == 1:
                scale = scale.reshape(()).expand(weight.shape[0])
            if scale.shape[:1] != weight.shape[:1]:
                raise LayoutError(_no_grid(weight, scale, "as many scales as weights"))
            return torch.stack([self._dequantized(w, s) for w, s in zip(weight.unbind(), scale.unbind(), strict=True)])
        if weight.dim() < 2:
            raise LayoutError(f"shape {list(weight.shape)} has no blocks.")
        scale, (rows, cols) = self._grid(weight, scale)
        if not weight.numel():
            return weight.to(self.dtype)
        # Pieces of whole blocks, the widest that there is room for, and then the highest.
        wide = min(scale.shape[1], max(1, _PIECE // (rows * cols)))
        high = max(1, _PIECE // (rows * cols * wide))
        bands = []
        for i in range(0, scale.shape[0], high):
            pieces = []
            for j in range(0, scale.shape[1], wide):
                part = weight[i * rows : (i + high) * rows, j * cols : (j + wide) * cols]
                inputs = [part, scale[i : i + high, j : j + wide]]
                pieces.append(defer(_Scaled(rows, cols, self.dtype), inputs, part.shape, self.dtype))
            bands.append(torch.cat(pieces, 1))
        return torch.cat(bands)

    def _grid(self, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """The scales as [row blocks, column blocks], and the rows and columns of a block."""
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(*(-(-extent // _ANY) for extent in weight.shape))
            return scale, (_ANY, _ANY)
        if tuple(scale.shape) == (weight.shape[0], 1):
            return scale, (1, weight.shape[1])
        if self.block_size is not None:
            counts = tuple(-(-extent // block) for extent, block in zip(weight.shape, self.block_size, strict=True))
            if tuple(scale.shape) != counts:
                raise LayoutError(_no_grid(weight, scale, f"{list(counts)} for blocks of {list(self.block_size)}"))
            return scale, self.block_size
        if scale.dim() != 2 or any(extent % count for extent, count in zip(weight.shape, scale.shape, strict=True)):
            raise LayoutError(_no_grid(weight, scale, "a grid that divides it evenly"))
        return scale, (weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1])

    def __repr__(self) -> str:
        return f"dequantize_fp8_blocks({self.block_size}, {self.dtype}, suffix={self.suffix!r})"


@dataclass(frozen=True)
class _Scaled:
    """FP8 [r, c] times float32 (or powers of two) [r / rows, c / cols], as `dtype`, a few rows at a time."""

    rows: int
    cols: int
    dtype: torch.dtype

    def __call__(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = torch.empty(weight.shape, dtype=self.dtype, device=weight.device)
        # Powers of two are stored as bytes, their exponents plus 127.
        exponents = scale.dtype == torch.uint8
        scale = (scale.to(torch.float32) - 127).exp2() if exponents else scale.to(torch.float32)
        step = max(1, _STEP // max(1, weight.shape[1]))
        blocks = max(1, step // self.rows)
        for block in range(0, scale.shape[0], blocks):
            # A factor for each column, and for each row where there are several blocks of them.
            factors = scale[block : block + blocks].repeat_interleave(self.cols, 1)[:, : weight.shape[1]]
            if blocks > 1:
                factors = factors.repeat_interleave(self.rows, 0)
            end = min((block + blocks) * self.rows, weight.shape[0])
            for start in range(block * self.rows, end, step):
                stop = min(start + step, end)
                out[start:stop] = weight[start:stop].to(torch.float32).mul_(factors[: stop - start])
        return out


def _remedy(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """What to do about a weight without a scale of the right name."""
    for suffix in _SUFFIXES:
        if name + suffix in tensors:
            return f"Pass suffix='{suffix}': there is '{name}{suffix}'."
    module = name.rpartition(".")[0]
    for scale in ("scale", "qscale_weight"):
        if f"{module}.{scale}" in tensors:
            return (
                f"There is '{module}.{scale}'; rename it first: "
                f"Layout([Rename('{{x:+}}.{scale}', '{{x}}.weight_scale_inv')]) | dequantize_fp8_blocks()."
            )
    return "Add it."


def _no_grid(weight: torch.Tensor, scale: torch.Tensor, want: str) -> str:
    return (
        f"shape {list(weight.shape)} wants {want}, got scales of shape {list(scale.shape)}. "
        "Pass the block_size that the config gives."
    )
