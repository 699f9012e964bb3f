"""LazyTensor: a torch.Tensor with a shape, a dtype and a device, whose data is not loaded yet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from hf_stream.copying.region import Region
from hf_stream.errors import LazyTensorError
from hf_stream.lazy.given import check_tensor
from hf_stream.lazy.sources import Buffer, Leaf, Source
from hf_stream.storage.base import Storage
from hf_stream.storage.memory import MemoryStorage

_OWN_ATTRIBUTES = frozenset({"_held", "_window"})


class LazyTensor(torch.Tensor):
    """A tensor whose value is an expression over bytes that are still where they are.

    View ops, `cat`, `stack`, casts and device moves build expressions and read nothing; other ops are deferred until
    a result is needed. `materialize()` and `real.copy_(lazy)` read. Results equal eager PyTorch bit for bit. Reading
    `shape`, `dtype`, `repr` or deep-copying never reads data; writing into a LazyTensor, or asking for its memory,
    raises `LazyTensorError`.

    Real tensors in an expression are held by reference: what is read is their value when the result is materialised.

    >>> x = LazyTensor.from_tensor(torch.arange(6.0).reshape(2, 3))
    >>> x.T[1:]
    LazyTensor(shape=[2, 2], dtype=torch.float32, device='cpu')
    >>> x.T[1:].materialize()
    tensor([[1., 4.],
            [2., 5.]])
    """

    # Sizes, strides, offset and dtype as a meta tensor: torch itself does the arithmetic of view ops on it.
    _window: torch.Tensor
    _held: Source | Buffer

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, window: torch.Tensor, source: Source | Buffer, device: torch.device | str = "cpu") -> LazyTensor:
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            window.size(),
            strides=window.stride(),
            storage_offset=window.storage_offset(),
            dtype=window.dtype,
            device=torch.device(device),
        )
        # C++ code that bypasses dispatch (gloo, for one) would otherwise be handed a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(lazy)
        lazy._window = window
        lazy._held = source
        return lazy

    def __init__(self, *_: Any, **__: Any) -> None:
        # torch.Tensor.__init__ takes no arguments; __new__ has done everything.
        super().__init__()

    @classmethod
    def from_storage(cls, storage: Storage, dtype: torch.dtype, shape: Sequence[int], offset: int) -> LazyTensor:
        """The contiguous tensor of `shape` whose bytes begin at byte `offset` of `storage`."""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), Leaf(storage, offset))

    @classmethod
    def from_region(cls, region: Region, device: torch.device | str = "cpu") -> LazyTensor:
        """The tensor that a strided region of a storage holds."""
        window = torch.empty_strided(region.size, region.stride, dtype=region.dtype, device="meta")
        return cls(window, Leaf(region.storage, region.offset), device)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> LazyTensor:
        """A lazy view of a real tensor's memory, with its strides and storage offset; a LazyTensor is given back.

        Raises:
            LazyTensorError: The tensor has no plain memory: it is on the meta device, sparse, or of a class that keeps
                its data elsewhere.
        """
        if isinstance(tensor, cls):
            return tensor
        check_tensor(tensor, "LazyTensor.from_tensor: what was given")
        plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if tensor.is_meta or tensor.layout != torch.strided or not plain:
            raise LazyTensorError(
                f"cannot read the memory of a {tensor.layout} {type(tensor).__name__} of shape {list(tensor.shape)} "
                f"on '{tensor.device}'; give a dense tensor with data"
            )
        tensor = tensor.detach().resolve_conj().resolve_neg()
        buffer = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="meta")
        window = buffer.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return cls(window, Leaf(MemoryStorage(tensor), 0), tensor.device)

    def materialize(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read the data: into `out` (same shape; cast to its dtype), or into a new contiguous tensor on this device.

        Raises:
            LazyTensorError: `out` has another shape; nothing has been written then.
            CopyError: Reading failed; names the file.
        """
        from hf_stream.lazy.run import materialize, write_into

        if out is None:
            return materialize([self])[0]
        check_tensor(out, "out=")
        if out.shape != self.shape:
            raise LazyTensorError(
                f"cannot materialize shape {list(self.shape)} into a tensor of shape {list(out.shape)}; "
                "pass out= of the same shape"
            )
        if out.is_conj() or out.is_neg():
            # Its memory holds other values than it shows: torch turns them round.
            out.detach().copy_(materialize([self])[0])
        else:
            write_into([(self, Region.of(out), "")])
        return out

    @property
    def _source(self) -> Source:
        """What its elements come from, as it is now."""
        held = self._held
        return held.taken() if isinstance(held, Buffer) else held

    @property
    def identity(self) -> Hashable:
        """Equal for lazies that show the same window of the same source, as tied weights do."""
        return self._source, tuple(self.shape), self.stride(), self.storage_offset(), self.dtype

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes set on this tensor by other code (`_is_hf_initialized` and the like)."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN_ATTRIBUTES}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch()(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else format(self.item(), spec)

    def __copy__(self) -> LazyTensor:
        twin = LazyTensor(self._window, self._source, self.device)
        twin.__dict__.update(self.attributes)
        return twin.requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        twin = memo[id(self)] = self.__copy__()
        twin.__dict__.update(copy.deepcopy(self.attributes, memo))
        return twin

    def tolist(self) -> Any:
        """The values as nested lists, read now."""
        return self.materialize().tolist()

    def _get_data(self) -> torch.Tensor:
        return self.detach()

    def _set_data(self, value: torch.Tensor) -> None:
        if isinstance(value, LazyTensor):
            # Torch swaps the metadata in C++ without dispatching; the expression must change with it.
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            self._window, self._held = value._window, value._held
            return
        # This very object becomes a real tensor, as its owners expect (`Module.to_empty`, for one).
        torch.utils.swap_tensors(self, dressed(value.detach(), self))  # type: ignore[no-untyped-call]

    data = property(_get_data, _set_data)


def dressed(real: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`real` as the parameter or plain tensor that `like` is, with the attributes that other code has set on it."""
    if isinstance(like, torch.nn.Parameter):
        real = torch.nn.Parameter(real, requires_grad=like.requires_grad)
    attributes = like.attributes if isinstance(like, LazyTensor) else like.__dict__
    for name, value in attributes.items():
        if name != "_is_param":
            setattr(real, name, value)
    return real


@cache
def _dispatch() -> Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]:
    # Imported on first use, as it builds on this module, and kept: an import statement costs a third of a view op.
    from hf_stream.lazy.dispatch import dispatch

    return dispatch


def _refuse(what: str, instead: str = "call .materialize() first") -> NoReturn:
    raise LazyTensorError(f"cannot {what} a LazyTensor: its data is not loaded; {instead}")


def _guard(what: str) -> Callable[..., NoReturn]:
    def method(self: LazyTensor, *_: Any, **__: Any) -> NoReturn:
        _refuse(what)

    return method


# These never reach __torch_dispatch__: unguarded they give address 0, zeros, or a crash.
for _names, _what in (
    (("data_ptr", "const_data_ptr", "mutable_data_ptr"), "take the address of"),
    (("storage", "untyped_storage", "_typed_storage"), "take the storage of"),
    (("numpy", "__array__", "__dlpack__"), "export the data of"),
    (("share_memory_",), "share the memory of"),
    (("__reduce_ex__", "__reduce__"), "pickle"),
):
    for _name in _names:
        setattr(LazyTensor, _name, _guard(_what))
