"""What a pickle of torch.save means: which tensors it holds, and where in which storage each of them lies.

The names in `_NAMES` are all that have a meaning here, whatever torch was told to trust; others stand for themselves.
Tensors come out as `TensorRecord`s: numbers, checked against the size of their storage.
"""

from __future__ import annotations

import math
import mmap
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch

from hf_stream.errors import FormatError
from hf_stream.formats.budget import Budget
from hf_stream.formats.pickle_functions import FUNCTIONS, functions, is_whole, whole_numbers
from hf_stream.formats.pickle_objects import Function, Inert, InertClass
from hf_stream.formats.pickle_reader import brief, read_pickle

# What a storage says of where it was, and what its bytes can be read to from. "meta" has none.
_DEVICE: Final = re.compile(r"(cpu|cuda|mps|xpu|hpu|xla|mtia|npu)(:\d+)?")
_MAX: Final = 2**63 - 1
_MAX_DIMS: Final = 64
# Of memory, for a tensor: its record, and the LazyTensor that is made of it.
_TENSOR_NBYTES: Final = 1500


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One storage.

    Attributes:
        key: The name of its record, after "data/".
        dtype: What its elements were saved as; None for one of bytes, whose tensors say it.
        nbytes: Its size.
    """

    key: str
    dtype: torch.dtype | None
    nbytes: int


@dataclass(eq=False, slots=True)
class TensorRecord:
    """One tensor: a strided window on a storage, in elements of `dtype`.

    Attributes:
        requires_grad: As saved.
        parameter: Whether it is a `torch.nn.Parameter`.
        conj: Whether its values are the conjugates of those in the storage.
        neg: Whether they are their negatives.
        attributes: What else was set on it.
    """

    storage: StorageRecord
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Refused:
    """A tensor that has no plain bytes; `what` says in words why."""

    what: str


class TorchPickle:
    """A reader of the pickles of one file, which share their storages.

    Args:
        budget: What is left for the file.
        legacy: Whether the file is of the format that torch.save had before 1.6.

    Attributes:
        storages: Those that were named so far, by key.
    """

    def __init__(self, budget: Budget, legacy: bool = False) -> None:
        self._budget = budget
        self.storages: dict[str, StorageRecord] = {}
        self._legacy = legacy
        # The old format says also of which other storage this one is a part.
        self._nfields = 6 if legacy else 5

    def read(self, data: bytes | mmap.mmap, name: str, start: int = 0) -> tuple[Any, int]:
        """The object, with a `TensorRecord` for each tensor, and the byte after the pickle's end.

        Leaves may also be a `StorageRecord`, a `Refused`, a `Function`, an `InertClass` or an `Inert`: what can be in a
        pickle but is no value.

        Raises:
            FormatError: The pickle is damaged.
        """
        return read_pickle(data, _find_any, self._persistent, name, self._budget, start)

    def _persistent(self, identity: Any) -> StorageRecord | InertClass:
        """What a persistent id stands for: a storage, or in the old format a class, whose source code is beside it."""
        if self._legacy and type(identity) is tuple and len(identity) == 4 and type(identity[1]) is InertClass:
            return identity[1]
        return self.storage(identity)

    def storage(self, identity: Any) -> StorageRecord:
        """What a persistent id stands for; `FormatError` if it is not that of a storage."""
        fields: Any = (
            identity if type(identity) is tuple and len(identity) == self._nfields else (None,) * self._nfields
        )
        tag, kind, key, device, numel, *whole = fields
        if type(kind) is InertClass:
            raise FormatError(f"a storage of the type {brief(kind)}")
        if tag != "storage" or type(kind) is not StorageKind or type(key) is not str or type(device) is not str:
            raise FormatError("a reference to something else than a storage")
        if whole and whole[0] is not None:
            raise FormatError("a storage that is a part of another one; load it with torch and save it again")
        if not is_whole(numel) or not _DEVICE.fullmatch(device):
            raise FormatError(f"storage {brief(key)} of {brief(numel)} elements on device {brief(device)}")
        dtype: torch.dtype | None = kind.dtype
        record = StorageRecord(key, dtype, numel * (dtype or torch.uint8).itemsize)
        if self.storages.setdefault(key, record) != record:
            raise FormatError(f"storage {brief(key)} is named twice, with different types or sizes")
        return record


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A class of storages; no value by itself."""

    dtype: torch.dtype | None


def find_name(module: str, name: str) -> Any:
    """What a name in the pickle stands for; `KeyError` if it may not be there."""
    return _NAMES[module, name]


def _find_any(module: str, name: str) -> Any:
    return _NAMES.get((module, name)) or InertClass(f"{module}.{name}")


def _tensor_v2(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Any:
    dtype = storage.dtype if type(storage) is StorageRecord else None
    return _tensor(storage, dtype or torch.uint8, offset, size, stride, requires_grad, hooks, metadata)


def _tensor_v1(storage: Any, offset: Any, size: Any, stride: Any) -> Any:
    return _tensor_v2(storage, offset, size, stride)


def _tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Any:
    if type(dtype) is InertClass:
        return Refused(f"a tensor of the type {brief(dtype)}")
    if type(dtype) is not torch.dtype:
        raise FormatError(f"a tensor of the type {brief(dtype)}")
    return _tensor(storage, dtype, offset, size, stride, requires_grad, hooks, metadata)


def _tensor(
    storage: Any, dtype: torch.dtype, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any
) -> TensorRecord | Refused:
    if type(storage) is not StorageRecord:
        raise FormatError(f"a tensor whose storage is a {type(storage).__name__}")
    if dtype not in _DTYPES:
        return Refused(f"a tensor of {dtype}")
    size, stride = whole_numbers(size, _MAX_DIMS), whole_numbers(stride, _MAX_DIMS)
    if size is None or stride is None or len(size) != len(stride) or not is_whole(offset):
        raise FormatError(f"storage '{storage.key}': a tensor whose size, strides or offset are not those of one")
    numel = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if numel else 0
    if max(numel, last, math.prod(max(n, 1) for n in size)) * dtype.itemsize > _MAX:
        raise FormatError(f"storage '{storage.key}': a tensor of {list(size)} elements is larger than any memory")
    if numel and (last + 1) * dtype.itemsize > storage.nbytes:
        raise FormatError(
            f"storage '{storage.key}' has {storage.nbytes} bytes, but a tensor of {dtype} with size {list(size)}, "
            f"strides {list(stride)} and offset {offset} needs {(last + 1) * dtype.itemsize} of them"
        )
    if type(requires_grad) is not bool or (requires_grad and not (dtype.is_floating_point or dtype.is_complex)):
        raise FormatError(f"storage '{storage.key}': a tensor of {dtype} whose requires_grad is {brief(requires_grad)}")
    _check_hooks(hooks)
    conj, neg = _bits(metadata)
    if (conj and not dtype.is_complex) or (neg and not (dtype.is_complex or dtype.is_floating_point)):
        raise FormatError(f"storage '{storage.key}': a conjugated or negated tensor of {dtype}")
    return TensorRecord(storage, dtype, size, stride, offset, requires_grad, conj=conj, neg=neg)


def _bits(metadata: Any) -> tuple[bool, bool]:
    bits = {} if metadata is None else metadata
    if type(bits) is not dict or bits.keys() - {"conj", "neg"} or any(type(bit) is not bool for bit in bits.values()):
        raise FormatError(f"tensor metadata {brief(metadata)} that is not known")
    return bits.get("conj", False), bits.get("neg", False)


def _check_hooks(hooks: Any) -> None:
    if hooks is not None and not (type(hooks) is OrderedDict and not hooks):
        raise FormatError("a tensor with hooks, which are code")


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> Any:
    if type(data) is Refused:
        return data
    if type(data) is Inert:
        return Refused(f"a parameter that is made of an object of {brief(data)}")
    if type(data) is not TensorRecord or type(requires_grad) is not bool:
        raise FormatError("a parameter that is not made of a tensor")
    _check_hooks(hooks)
    if requires_grad and not (data.dtype.is_floating_point or data.dtype.is_complex):
        raise FormatError(f"a parameter of {data.dtype} that requires a gradient")
    # Another object than the tensor it is made of, which may stand elsewhere by itself.
    return TensorRecord(
        data.storage, data.dtype, data.size, data.stride, data.offset, requires_grad, True, data.conj, data.neg
    )


def _parameter_with_state(data: Any, requires_grad: Any, hooks: Any, state: Any) -> Any:
    return _with_state(_parameter(data, requires_grad, hooks), state)


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor with attributes, or of a subclass."""
    if type(function) is InertClass:
        return Refused(f"a tensor that {brief(function)} makes")
    if type(function) is not Function or function not in _TENSOR_FUNCTIONS or type(arguments) is not tuple:
        raise FormatError("a tensor that is made by something else than torch's functions for that")
    record = function.call(*arguments)
    if type(record) is TensorRecord and kind is not (_PARAMETER if record.parameter else _TENSOR):
        return Refused(f"a tensor of {f'the class {brief(kind)}' if type(kind) is InertClass else 'another class'}")
    return _with_state(record, state)


def _with_state(record: Any, state: Any) -> Any:
    if type(record) is Refused:
        return record
    if state is None:
        return record
    if type(state) is not dict:
        return Refused("a tensor with slots")
    for name in state:
        # Nothing that a tensor has can be replaced.
        if type(name) is not str or not name.isidentifier() or name.startswith("__") or hasattr(torch.Tensor, name):
            raise FormatError(f"a tensor has the attribute {brief(name)}")
    record.attributes.update(state)
    return record


def _refused(what: str) -> Callable[..., Refused]:
    return lambda *_: Refused(what)


def _not_callable(*_: Any) -> NoReturn:
    raise FormatError(
        "the pickle makes tensors in a way of very old versions of torch; load it with torch and save again"
    )


_TENSOR: Final = Function("torch.Tensor", _not_callable)
_PARAMETER: Final = Function("torch.nn.Parameter", _not_callable)

_STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
# Tensors of these have plain elements.
_DTYPES: Final = frozenset(
    {
        *_STORAGES.values(),
        torch.complex32,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
    }
)
_QUANTIZED: Final = {
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt8Storage": torch.quint8,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
_SCHEMES: Final = (
    torch.per_tensor_affine,
    torch.per_tensor_symmetric,
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)


_REBUILD: Final = functions(
    "torch._utils",
    _TENSOR_NBYTES,
    _rebuild_tensor=_tensor_v1,
    _rebuild_tensor_v2=_tensor_v2,
    _rebuild_tensor_v3=_tensor_v3,
    _rebuild_parameter=_parameter,
    _rebuild_parameter_with_state=_parameter_with_state,
    _rebuild_meta_tensor_no_storage=_refused("a tensor on the meta device, which has no data"),
    _rebuild_sparse_tensor=_refused("a sparse tensor"),
    _rebuild_qtensor=_refused("a quantized tensor"),
    _rebuild_nested_tensor=_refused("a nested tensor"),
    _rebuild_wrapper_subclass=_refused("a tensor of a class of its own"),
    _rebuild_device_tensor_from_numpy=_refused("a tensor of a device that has no storages"),
    _rebuild_device_tensor_from_cpu_tensor=_refused("a tensor of a device that has no storages"),
)
_TENSOR_FUNCTIONS: Final = frozenset(_REBUILD.values())

_NAMES: Final[dict[tuple[str, str], Any]] = {
    **_REBUILD,
    **functions("torch._tensor", _TENSOR_NBYTES, _rebuild_from_type_v2=_from_type),
    **FUNCTIONS,
    ("torch", "Tensor"): _TENSOR,
    ("torch.nn.parameter", "Parameter"): _PARAMETER,
    **{("torch", str(value).removeprefix("torch.")): value for value in (*_DTYPES, *_QUANTIZED.values(), *_SCHEMES)},
    **{
        (module, name): StorageKind(dtype)
        for module in ("torch", "torch.cuda")
        for name, dtype in {**_STORAGES, **_QUANTIZED}.items()
    },
    ("torch.storage", "UntypedStorage"): StorageKind(None),
}
