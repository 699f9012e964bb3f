"""Load named tensors into a module, in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.copying.region import Region
from hf_stream.errors import CheckpointError
from hf_stream.lazy import materialize, write_into

_LISTED = 5


def load_into(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> _IncompatibleKeys:
    """Stream tensors into a module's parameters and persistent buffers.

    A tensor that the module has already is filled where it is, cast to its dtype, on its device: optimizers and tied
    weights keep seeing it. One on the meta device is replaced by a new tensor on the CPU, of the module's dtype. Tied
    weights need to be there under one of their names only.

    Args:
        module: The module to fill.
        tensors: Name -> lazy or real tensor, of the module's names.
        strict: Whether missing and unexpected names are errors.
        buffer_size: Bytes in flight, at most; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        `missing_keys` and `unexpected_keys`, as `Module.load_state_dict` does.

    Raises:
        CheckpointError: Names or shapes do not fit; nothing has been changed then.
        CopyError: Reading failed.
    """
    targets = module.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, target in targets.items():
        names_of.setdefault(id(target), []).append(name)
    unexpected = [name for name in tensors if name not in targets]
    missing = [names[0] for names in names_of.values() if not any(name in tensors for name in names)]
    misfits = [
        f"'{name}': the module wants shape {list(targets[name].shape)}, got {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in targets and tensor.shape != targets[name].shape
    ]
    if strict:
        misfits += [f"'{name}' is missing" for name in missing]
        misfits += [f"'{name}' is not in the module" for name in unexpected]
    if misfits:
        more = f" and {len(misfits) - _LISTED} more" if len(misfits) > _LISTED else ""
        raise CheckpointError(
            f"{len(misfits)} tensors do not fit {type(module).__name__}: {'; '.join(misfits[:_LISTED])}{more}. "
            "Use a layout that maps them, or strict=False for names that may be left over"
        )
    chosen = {names[0]: next((n for n in names if n in tensors), None) for names in names_of.values()}
    sources = {target: tensors[source] for target, source in chosen.items() if source is not None}
    _replace_meta(module, targets, sources, names_of, buffer_size)
    jobs = [
        (tensor, Region.of(targets[name].detach()), name)
        for name, tensor in sources.items()
        if targets[name].device.type != "meta"
    ]
    write_into(jobs, buffer_size=buffer_size, progress=progress, desc="Loading")
    return _IncompatibleKeys(missing, unexpected)


def _replace_meta(
    module: nn.Module,
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    names_of: Mapping[int, list[str]],
    buffer_size: int,
) -> None:
    wanted = {
        name: tensor.to(targets[name].dtype) for name, tensor in sources.items() if targets[name].device.type == "meta"
    }
    for name, value in materialize(wanted, buffer_size=buffer_size).items():
        old = targets[name]
        if isinstance(old, nn.Parameter):
            value = nn.Parameter(value, requires_grad=old.requires_grad)
        for alias in names_of[id(old)]:
            owner, _, leaf = alias.rpartition(".")
            setattr(module.get_submodule(owner), leaf, value)
