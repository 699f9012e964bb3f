"""`from_pretrained`, streaming: transformers gets lazies, and what it has placed in the model is read at the end.

Transformers resolves files, builds the model, renames, converts, casts, assigns devices and reports, all as ever, but
the tensors it handles are not loaded. Only then is every parameter read, in parallel, straight to its place. The one
place where this hooks in is `PreTrainedModel._load_pretrained_model`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_utils import _is_on_hf_mount, load_state_dict
from transformers.utils.quantization_config import QuantizationMethod

from hf_stream.checkpoint import AnyLayout, apply_layout, open_files
from hf_stream.checkpoint.again import State, state_of, state_of_directory, until_unchanged
from hf_stream.checkpoint.casting import cast_target
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.errors import ArgumentTypeError, CheckpointError, LayoutError, LazyTensorError
from hf_stream.formats.collector import collector_paused
from hf_stream.formats.regular_files import opening
from hf_stream.formats.shared import Shared
from hf_stream.integrations.transformers.bin_files import bin_state, dtypes_read_here, is_bin_file
from hf_stream.integrations.transformers.hooks import Request, asking, hooked
from hf_stream.integrations.transformers.offload import streamed_offload
from hf_stream.integrations.transformers.quantized import real_inputs
from hf_stream.layouts.transformers_engine import no_bars, no_thread_pool
from hf_stream.layouts.transformers_speed import little_work_per_key
from hf_stream.lazy import LazyTensor, materialize
from hf_stream.lazy.given import kind
from hf_stream.utils.sizes import nbytes_of

Loader = Callable[..., Any]
Model = TypeVar("Model", covariant=True)
Result = TypeVar("Result")

# Other files in the directory, an optimizer's for one, may change at any time.
_WHAT_TRANSFORMERS_READS: Final = re.compile(
    r".*config\.json|.*\.index(\..+)?\.json|(adapter_|pytorch_)?model[-.].*\.(bin|safetensors)", re.DOTALL
)

_CLASS_FIRST: Final = (
    "from_pretrained takes a class of transformers first, got {}; write "
    "hf_stream.from_pretrained(AutoModelForCausalLM, path), or hf_stream.AutoModelForCausalLM.from_pretrained(path)"
)


class Pretrained(Protocol[Model]):
    """A class with `from_pretrained`: a model class or an Auto class."""

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Model: ...


def from_pretrained(
    cls: Pretrained[Model],
    pretrained_model_name_or_path: str | os.PathLike[str] | None = None,
    *args: Any,
    layout: AnyLayout | None = None,
    strict: bool = False,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
    **kwargs: Any,
) -> Model:
    """`cls.from_pretrained(...)`, reading each parameter straight to its place in its final dtype and layout.

    The model is the one that plain transformers gives, bit for bit. Anonymous memory beyond it stays below
    `buffer_size` plus the inputs of one deferred operation, or of one parameter that is being quantized. On the CPU,
    parameters that lie in the files just as they are needed are private mappings of the files, as in transformers.

    Args:
        cls: A model class or an Auto class of transformers.
        pretrained_model_name_or_path: As in transformers, like all further arguments; None with a `state_dict`.
        layout: Maps the checkpoint's names and tensors to those that the model would have in its own checkpoint;
            transformers' conversions for the architecture then run on the result.
        strict: Whether a rule of the layout that finds nothing is an error, and not a warning.
        buffer_size: Bytes in flight, at most, also as text such as "64MB".
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        What `cls.from_pretrained` returns.

    Raises:
        ArgumentTypeError: The class was forgotten, for one.
        LayoutError: The layout does not fit the checkpoint, or cannot be combined with the other arguments.
        FormatError, CheckpointError, CopyError: The files cannot be used or read.

    >>> model = hf_stream.from_pretrained(AutoModelForCausalLM, "org/repo", dtype="auto")  # doctest: +SKIP
    """
    if not hasattr(cls, "from_pretrained"):
        raise ArgumentTypeError(_CLASS_FIRST.format(kind(cls)))
    if pretrained_model_name_or_path is None and kwargs.get("state_dict") is None:
        raise ArgumentTypeError("which checkpoint? pass its path, or the name of a repository, after the class")
    request = Request(layout, strict=strict, buffer_size=nbytes_of(buffer_size, "buffer_size"), progress=progress)
    return load_as_requested(request, cls, pretrained_model_name_or_path, *args, **kwargs)


def load_as_requested(
    request: Request, cls: Pretrained[Model], path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
) -> Model:
    """`cls.from_pretrained(path, ...)` in the way of a request, whose layout must be used."""
    layout = request.layout
    if layout is not None and kwargs.get("gguf_file"):
        # Transformers may read all of it before it loads the model.
        raise _conflict("a GGUF file")
    used = False
    kwargs = with_dtypes(kwargs)

    def note() -> None:
        nonlocal used
        used = True

    noting = replace(request, layout_used=note)
    loaded = load_whole(noting, path, kwargs.get("subfolder"), lambda: cls.from_pretrained(path, *args, **kwargs))
    if layout is not None and not used:
        raise LayoutError(
            f"{getattr(cls, '__name__', cls)} loaded '{path}' in a way of its own and did not use the layout; "
            "convert the checkpoint first, with hf_stream.convert"
        )
    return loaded


def with_dtypes(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` in which dtypes that have short names here, such as "bf16", are dtypes.

    Raises:
        ArgumentError: A name is not known, or weights cannot be of that type.
    """
    known = dict(kwargs)
    for argument in {"dtype", "torch_dtype"} & kwargs.keys():
        value = kwargs[argument]
        if isinstance(value, Mapping):
            known[argument] = {part: _as_known(dtype) for part, dtype in value.items()}
        else:
            known[argument] = _as_known(value)
    return known


def _as_known(dtype: Any) -> Any:
    # None, "auto" and what is no dtype at all is for transformers to judge.
    return cast_target(dtype) if isinstance(dtype, torch.dtype | str) and dtype != "auto" else dtype


def load_whole(
    request: Request, path: str | os.PathLike[str] | None, subfolder: str | None, load: Callable[[], Result]
) -> Result:
    """Run a `from_pretrained` in the way of a request, and from its start once more if files are replaced meanwhile.

    Transformers reads the config and the index before it comes to the weights, and none of them may be of another
    checkpoint.

    Args:
        request: How to load.
        path: What is loaded.
        subfolder: Where in it.
        load: Loads it.
    """
    if not isinstance(path, str | os.PathLike | None):
        raise ArgumentTypeError(
            f"a path or the name of a repository is wanted, got {kind(path)}; tensors go to state_dict="
        )
    directory = os.path.join(path or "", subfolder or "")
    started = State()

    def state() -> State:
        return state_of_directory(directory, _WHAT_TRANSFORMERS_READS)

    def check_files() -> None:
        if state() != started:
            raise CheckpointError(f"'{directory}' was replaced while it was being loaded; load it again")

    def attempt() -> Result:
        nonlocal started
        started = state()
        return load()

    with streamed_loads(), asking(replace(request, check_files=check_files)):
        return until_unchanged(attempt, state, directory, (Exception,))


def stream_load(
    load: Loader,
    request: Request,
    model: PreTrainedModel,
    state_dict: Mapping[str, torch.Tensor] | None,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    expected_keys: list[str] | None = None,
) -> Any:
    """Run transformers' `_load_pretrained_model` (`load`) on lazies, and read what it has placed in the model."""
    if expected_keys is not None:
        # An adapter, which transformers loads into the model when that is there: the layout is that of the model.
        request = replace(request, layout=None)
    obstacle = _obstacle(load_config)
    if request.layout is not None and (other := obstacle or _described_by_name(load_config)):
        raise _conflict(other)
    if obstacle is not None:
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)
    alias = _may_map(checkpoint_files or (), load_config)
    with collector_paused():
        opened = _open(state_dict, checkpoint_files, load_config)
        if request.check_files is not None:
            request.check_files()
        tensors = apply_layout(request.layout, opened, config=model.config, strict=request.strict)
        if request.layout_used is not None:
            request.layout_used()
    with (
        asking(None),
        nullcontext() if _works_on_data(load_config) else _symbolic(),
        no_thread_pool(),
        real_inputs(load_config, buffer_size=request.buffer_size, alias=alias),
        streamed_offload(request.buffer_size),
    ):
        # Transformers need not write to the offload folder what lies in a file already, if that is what is wanted.
        result = load(model, tensors, checkpoint_files if request.layout is None else None, load_config, expected_keys)
    if not request.lazily:
        materialize_model(model, request, alias=alias)
    return result


def materialize_model(model: nn.Module, request: Request, *, alias: bool) -> None:
    """Read every lazy parameter and buffer of a model, in parallel, and put the real ones in their places.

    Args:
        model: The model.
        request: How to read.
        alias: Whether those that lie in a file just as they are may be mappings of it.
    """
    places: list[tuple[nn.Module, str, LazyTensor]] = [
        (module, name, tensor)
        for module in model.modules()
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
        if isinstance(tensor, LazyTensor)
    ]
    # Transformers reads files in threads of its own, which are never in inference mode: its models can be trained.
    with torch.inference_mode(False):
        reals = materialize(
            [tensor for _, _, tensor in places],
            buffer_size=request.buffer_size,
            progress=request.progress,
            desc="Loading",
            alias=alias,
        )
    for (module, name, _), real in zip(places, reals, strict=True):
        # Modules may keep further references: recurrent ones have a list of their weights.
        setattr(module, name, real)


def _open(
    state_dict: Mapping[str, torch.Tensor] | None, checkpoint_files: Sequence[str] | None, load_config: Any
) -> Mapping[str, torch.Tensor]:
    if state_dict is not None:
        return {name: _lazy(tensor) for name, tensor in state_dict.items()}
    files = checkpoint_files or []
    name = load_config.pretrained_model_name_or_path or ", ".join(files)

    def attempt() -> dict[str, Any]:
        before = state_of(files)
        loaded: dict[str, Any] = {}
        for file in files:
            # One by one: of a name in two files, transformers takes the last.
            loaded.update(_open_file(file, load_config))
        if state_of(files) != before:
            # Each may be of another checkpoint: those that were there all the time were there together.
            raise CheckpointError(f"'{name}' was replaced while it was being opened; load it again")
        return loaded

    with opening(name):
        loaded = until_unchanged(attempt, lambda: state_of(files), name)
    return {name: _lazy(tensor) for name, tensor in loaded.items()}


def _open_file(file: str, load_config: Any) -> Mapping[str, Any]:
    if file.endswith(".safetensors"):
        return open_files(load_config.pretrained_model_name_or_path or file, [file])
    if is_bin_file(file):
        # Whatever `weights_only` says: no pickle is executed.
        return bin_state(file)
    loaded: Mapping[str, Any] = load_state_dict(file, disable_mmap=load_config.disable_mmap)
    return loaded


def _lazy(entry: Any) -> Any:
    """A lazy view of a tensor; what has no plain memory (quantized tensors, say), or is no tensor, as it is."""
    try:
        return LazyTensor.from_tensor(entry) if isinstance(entry, torch.Tensor) else entry
    except LazyTensorError:
        return entry


def _may_map(checkpoint_files: Sequence[str], load_config: Any) -> bool:
    """Whether transformers would leave these files mapped."""
    return not (load_config.disable_mmap or any(map(_is_on_hf_mount, checkpoint_files)))


def _obstacle(load_config: Any) -> str | None:
    """What of a load transformers does by itself, in words; None if it can stream."""
    quantizer = load_config.hf_quantizer
    if quantizer is not None and quantizer.quantization_config.quant_method == QuantizationMethod.GGUF:
        return "a GGUF file"
    if load_config.device_mesh is not None:
        return "a device mesh"
    if is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        return "DeepSpeed ZeRO-3"
    return None


def _described_by_name(load_config: Any) -> str | None:
    """A checkpoint whose files' headers say by name what its tensors are, in words; None for all others."""
    quantizer = load_config.hf_quantizer
    if quantizer is None or quantizer.quantization_config.quant_method != QuantizationMethod.TORCHAO:
        return None
    return "a checkpoint that torchao has quantized" if quantizer.pre_quantized else None


def _conflict(other: str) -> LayoutError:
    return LayoutError(
        f"a layout cannot be combined with {other}; convert the checkpoint first, with hf_stream.convert"
    )


def _works_on_data(load_config: Any) -> bool:
    """Whether transformers writes or computes while it loads: that takes its time, and makes garbage."""
    return load_config.hf_quantizer is not None or "disk" in (load_config.device_map or {}).values()


@contextmanager
def _symbolic() -> Iterator[None]:
    """Run a block that is done in no time, and needs neither the garbage collector nor transformers' bars."""
    with collector_paused(), no_bars(), little_work_per_key():
        yield


@contextmanager
def _streamed() -> Iterator[None]:
    with hooked("_load_pretrained_model", stream_load), dtypes_read_here():
        yield


streamed_loads = Shared(_streamed)
