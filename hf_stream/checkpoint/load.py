"""Load named tensors into a module, in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_stream.checkpoint.mapping import AnyLayout, apply_layout
from hf_stream.copying.executor import DEFAULT_BUFFER_SIZE
from hf_stream.copying.progress import Progress
from hf_stream.copying.region import Region
from hf_stream.errors import ArgumentTypeError, MisfitError
from hf_stream.lazy import LazyTensor, dressed, named_tensors, write_into
from hf_stream.lazy.given import kind
from hf_stream.utils.sizes import nbytes_of

_LISTED = 5


def load_into(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: AnyLayout | None = None,
    config: object = None,
    strict: bool = True,
    buffer_size: int | str = DEFAULT_BUFFER_SIZE,
    progress: bool | Progress | None = None,
) -> _IncompatibleKeys:
    """Stream tensors into a module's parameters and persistent buffers.

    A tensor that the module has already is filled where it is, cast to its dtype, on its device: optimizers and tied
    weights keep seeing it. One on the meta device, or a LazyTensor, is replaced by a new tensor of its dtype (on the
    CPU instead of the meta device). Tied weights need to be there under one of their names only; of several, the last
    counts. Modules' own `_load_from_state_dict` and extra state are left out: where they matter, use
    `module.load_state_dict(tensors)`, which streams as well.

    Args:
        module: The module to fill.
        tensors: Name -> lazy or real tensor, of the module's names, or of those that the layout makes these of.
        layout: Applied to the tensors first.
        config: The model's config, for sizes that the layout does not have: an object, a dict, the path of a file, or a
            model. None: the one beside the checkpoint, or else that of the module.
        strict: Whether missing and unexpected names are errors, and rules of the layout that find nothing.
        buffer_size: Bytes in flight, at most, also as "64MB"; the inputs of one deferred operation come on top.
        progress: True for a bar in bytes, None for a bar on terminals only, False for none.

    Returns:
        `missing_keys` and `unexpected_keys`, as `Module.load_state_dict` does.

    Raises:
        MisfitError, LayoutError: Names or shapes do not fit; nothing has been changed then.
        CopyError: Reading failed; the module may be filled in part.
    """
    buffer_size = nbytes_of(buffer_size, "buffer_size")
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"load_into fills a module, which comes first, got {kind(module)}")
    if config is None and getattr(tensors, "config", None) is None:
        config = getattr(module, "config", None)
    tensors = apply_layout(layout, named_tensors(tensors, "load_into"), config=config, strict=strict)
    targets = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    names_of: dict[Hashable, list[str]] = {}
    for name, target in targets.items():
        names_of.setdefault(_identity(target), []).append(name)
    sources = {names[-1]: [name for name in names if name in tensors][-1:] for names in names_of.values()}
    unexpected = [name for name in tensors if name not in targets]
    missing = [name for name, found in sources.items() if not found]
    _check_fit(module, targets, tensors, missing if strict else [], unexpected if strict else [])

    fresh: dict[str, torch.Tensor] = {}
    filled: list[torch.Tensor] = []
    jobs = []
    for names in names_of.values():
        for source in sources[names[-1]]:
            old = targets[source]
            if old.is_meta or isinstance(old, LazyTensor):
                target = torch.empty(old.shape, dtype=old.dtype, device="cpu" if old.is_meta else old.device)
                fresh.update(dict.fromkeys(names, dressed(target, old)))
            else:
                target = old.detach()
                filled.append(target)
            jobs.append((tensors[source].detach(), Region.of(target), source))
    write_into(jobs, buffer_size=buffer_size, progress=progress, desc="Loading")
    for name, value in fresh.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value)
    # So that autograd notices if the backward pass of something computed earlier needs the old values.
    torch.autograd.graph.increment_version([target for target in filled if not target.is_inference()])
    return _IncompatibleKeys(missing, unexpected)


def _identity(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are one: the same object, or the same window on the same memory."""
    if tensor.is_meta or isinstance(tensor, LazyTensor) or tensor.numel() == 0:
        return id(tensor)
    return Region.of(tensor.detach())


def _check_fit(
    module: nn.Module,
    targets: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    missing: list[str],
    unexpected: list[str],
) -> None:
    misfits = [
        f"'{name}': the module wants shape {list(targets[name].shape)}, got {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in targets and tensor.shape != targets[name].shape
    ]
    misfits += [f"'{name}' is missing" for name in missing]
    misfits += [f"'{name}' is not in the module" for name in unexpected]
    if misfits:
        more = f" and {len(misfits) - _LISTED} more" if len(misfits) > _LISTED else ""
        raise MisfitError(
            f"{len(misfits)} tensors do not fit {type(module).__name__}: {'; '.join(misfits[:_LISTED])}{more}. "
            "Use a layout that maps them, or strict=False for names that may be left over"
        )
