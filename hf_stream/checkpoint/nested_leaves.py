"""The leaves of a nested state that are not plain Python: tensors, numpy arrays, and torch's small values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_stream.checkpoint.files import check_has_data
from hf_stream.checkpoint.nested_sharing import find_bases
from hf_stream.errors import CheckpointError, FormatError
from hf_stream.formats.budget import MIN_TAKEN, RATE
from hf_stream.formats.nested import malformed
from hf_stream.formats.nested_paths import Keys, PathNames
from hf_stream.formats.strict_json import Pairs
from hf_stream.formats.tensor_ref import TensorRef, View
from hf_stream.lazy import LazyTensor

TENSOR = "tensor"
ARRAY = "ndarray"

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_SCALARS: dict[str, type[np.generic]] = {
    np.dtype(kind).name: kind
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    )
}
# What a safetensors file and torch can hold as well.
_ARRAYS = frozenset(np.dtype(kind) for name, kind in _SCALARS.items() if name != "complex128")


class LeafWriter:
    """Turns leaves into nodes, and remembers the tensors to be written."""

    def __init__(self) -> None:
        self._name = PathNames()
        self._leaves: list[tuple[dict[str, Any], str, TensorRef, torch.Tensor]] = []
        self._plain: dict[int, torch.Tensor] = {}  # what is written for a leaf that is in several places

    def __call__(self, value: object, keys: Keys) -> dict[str, Any] | None:
        """The node of a leaf, or None for what is none; for `encode_structure`."""
        if isinstance(value, torch.Tensor) or type(value) is np.ndarray:
            return self._add(self._name(keys), value)
        if type(value) in _SCALARS.values():
            assert isinstance(value, np.generic)
            return {"numpy": [value.dtype.name, value.tobytes().hex()]}
        if type(value) is torch.Size:
            return {"Size": list(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        return None

    def place(self) -> dict[str, torch.Tensor]:
        """Write the names of the tensors into their nodes, and return the tensors by name, each once."""
        tensors, places = find_bases([(ref.name, tensor) for _, _, ref, tensor in self._leaves])
        for (node, tag, ref, _), (name, view) in zip(self._leaves, places, strict=True):
            node[tag] = TensorRef(name, view, ref.parameter, ref.requires_grad).to_json()
        return tensors

    def _add(self, name: str, value: torch.Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
        plain = self._plain.get(id(value))
        if plain is None:
            plain = _array_tensor(name, value) if isinstance(value, np.ndarray) else _plain_tensor(name, value)
            self._plain[id(value)] = plain
        tag, ref = ARRAY, TensorRef(name)
        if isinstance(value, torch.Tensor):
            tag, ref = TENSOR, TensorRef(name, None, isinstance(value, torch.nn.Parameter), value.requires_grad)
        node: dict[str, Any] = {}
        self._leaves.append((node, tag, ref, plain))
        return node


class LeafReader:
    """Turns nodes back into leaves; for `decode_structure`.

    Args:
        tensors: The tensors of the file, lazy or real.
        as_array: Makes a numpy array of one of them.

    Attributes:
        names: The tensors that leaves have asked for, by name, and the tags they were asked for under.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        as_array: Callable[[torch.Tensor], np.ndarray[Any, Any]],
    ) -> None:
        self._tensors = tensors
        self._as_array = as_array
        # By their text: the numbers of views could be chosen so that all have one hash.
        self._leaves: dict[str, object] = {}
        self._shown = 0
        self.names: dict[str, set[str]] = {}

    def __call__(self, tag: str, content: Any, keys: Keys) -> object:
        """The leaf.

        Raises:
            FormatError: There is none like this.
        """
        try:
            if tag in (TENSOR, ARRAY):
                return self._leaf(tag, TensorRef.parse(content))
            if tag in _SMALL:
                return _SMALL[tag](content)
        except (FormatError, TypeError, ValueError, RuntimeError) as error:
            raise malformed(keys, f"no {tag} ({error!s:.200})") from None
        raise malformed(keys, f"nothing is known of {tag!r:.40}; a newer version may know it")

    def _leaf(self, tag: str, ref: TensorRef) -> object:
        key = f"{tag} {ref}"
        if key not in self._leaves:
            if ref.name not in self._tensors:
                raise FormatError(f"the file has no tensor {ref.name!r:.200}")
            self.names.setdefault(ref.name, set()).add(tag)
            tensor = self._tensors[ref.name]
            if ref.view is not None:
                tensor = _view(tensor, ref.view)
                self._check_shown(ref.name, tensor)
            self._leaves[key] = self._tensor(tensor, ref) if tag == TENSOR else self._as_array(tensor)
        return self._leaves[key]

    def _check_shown(self, name: str, view: torch.Tensor) -> None:
        """Count the bytes of a view, which can be far more than those of its tensor."""
        self._shown += view.numel() * view.itemsize
        if self._shown > MIN_TAKEN:
            limit = max(MIN_TAKEN, RATE * self._nbytes)
            if self._shown > limit:
                raise FormatError(
                    f"with a view of {name!r:.200} of size {list(view.shape)} and strides {list(view.stride())} the "
                    f"views come to {self._shown} bytes, and the limit for files with {self._nbytes} bytes of tensors "
                    f"is {limit}; if that is right, expand the tensors after loading"
                )

    @cached_property
    def _nbytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self._tensors.values())

    def _tensor(self, tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
        if ref.parameter:
            return torch.nn.Parameter(tensor, requires_grad=ref.requires_grad)
        if ref.requires_grad:
            return tensor.detach().requires_grad_()
        return tensor


def _plain_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without what cannot come back: a graph, and laziness about signs.

    Raises:
        CheckpointError: It is more than its elements.
    """
    if isinstance(tensor, LazyTensor):
        return tensor
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        check_has_data(name, tensor)
        raise CheckpointError(
            f"'{name}' is a {type(tensor).__name__}, whose type would be lost; save a plain tensor in its place, "
            "such as .as_subclass(torch.Tensor)"
        )
    if tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized"
        raise CheckpointError(f"'{name}' is a {kind} tensor, which no safetensors file holds; make it a plain one")
    check_has_data(name, tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def _array_tensor(name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype not in _ARRAYS or not array.dtype.isnative:
        raise FormatError(
            f"'{name}' is a numpy array of {array.dtype.str!r}, which no safetensors file holds. "
            f"Cast it to one of {', '.join(sorted(map(str, _ARRAYS)))}."
        )
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()  # torch knows neither
    return torch.from_numpy(array)


def _view(tensor: torch.Tensor, view: View) -> torch.Tensor:
    if view.end > tensor.numel():
        raise FormatError(f"a view of element {view.end - 1} of a tensor of {tensor.numel()}")
    return tensor.as_strided(view.size, view.stride, tensor.storage_offset() + view.offset)


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise FormatError(f"{name!r:.40} is not one")
    return _DTYPES[name]


def _size(sizes: Any) -> torch.Size:
    if not isinstance(sizes, list) or not all(type(n) is int for n in sizes):
        raise FormatError(f"{sizes!r:.40} are not sizes")
    return torch.Size(sizes)


def _device(name: Any) -> torch.device:
    if not isinstance(name, str):
        raise FormatError(f"{name!r:.40} is not the name of one")
    device = torch.device(name)
    if str(device) != name:  # torch wraps large numbers round
        raise FormatError(f"{name!r:.40} is {device}")
    return device


def _scalar(content: Any) -> np.generic:
    if isinstance(content, Pairs) or len(content) != 2 or content[0] not in _SCALARS:
        raise FormatError(f"{content!r:.80} is not a type and its bytes")
    kind = _SCALARS[content[0]]
    bits = bytes.fromhex(content[1])
    if len(bits) != np.dtype(kind).itemsize:
        raise FormatError(f"{len(bits)} bytes of a {content[0]}")
    scalar: np.generic = np.frombuffer(bits, kind)[0]
    return scalar


_SMALL: dict[str, Callable[[Any], object]] = {"Size": _size, "dtype": _dtype, "device": _device, "numpy": _scalar}
