"""Damaged files of torch.save, zip and legacy, and TorchScript archives: refused, or read as torch reads them.

Files with Python objects in them as well, whose tensors are taken: no object is made, and no other error is raised.

python integration_tests/reliability/fuzz_pickles.py --count 100000 --seed 1
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import limited


def case(chance: random.Random, number: int, folder: Path) -> None:
    """Damage one file and read it in every way; fails if that is wrong."""
    import torch
    from file_facts import pwned
    from torch_files import FOLDER, files, fuzz, leaves, mutated, torch_loads

    import hf_stream
    from hf_stream.errors import HfStreamError

    names = files("good", "unusual", "hostile")
    place = folder / "x.pt"
    damage = chance.randrange(1 << 40)
    if number % 4 == 0:
        archive = _torchscript(folder) if number % 8 else _with_objects(folder, number)
        place.write_bytes(mutated(archive.read_bytes(), damage))
        _read_leniently(place)
        assert not pwned(), "the pickle has run code"
        return
    outcome = fuzz(FOLDER / names[number % len(names)], damage, place)
    _read_leniently(place)
    assert not pwned(), "the pickle has run code"
    try:
        loaded = hf_stream.load_nested(place)
    except (HfStreamError, OSError):
        assert outcome == "refused", "open_torch_file reads it, load_nested does not"
        return
    assert outcome == "equal", "load_nested reads it, open_torch_file does not"
    for (path, ours), (_, theirs) in zip(leaves(loaded), leaves(torch_loads(place)), strict=True):
        plain = theirs.detach().resolve_conj().resolve_neg()
        assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape), path
        raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, plain)]
        assert torch.equal(*raw), path


def _read_leniently(place: Path) -> None:
    import hf_stream
    from hf_stream.errors import HfStreamError

    for key in (None, "model", "state_dict"):
        for skip_unreadable in (False, True):
            with contextlib.suppress(HfStreamError, OSError):
                for lazy in hf_stream.open_checkpoint(place, key=key, skip_unreadable=skip_unreadable).values():
                    lazy.materialize()
    with contextlib.suppress(HfStreamError, OSError):
        hf_stream.load_nested(place, skip_unreadable=True)


def _with_objects(folder: Path, number: int) -> Path:
    import objects
    import torch

    kind = (objects.lightning, objects.fairseq)[number // 8 % 2]
    path = folder / f"{kind.__name__}_{number // 16 % 2}.pt"
    if not path.exists():
        with objects.installed():
            torch.save(kind(), path, _use_new_zipfile_serialization=bool(number // 16 % 2))
    return path


def _torchscript(folder: Path) -> Path:
    import torch

    path = folder / "script.pt"
    if not path.exists():

        class Inner(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.arange(6.0))
                self.register_buffer("b", torch.ones(2, 3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        class Outer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = Inner(), Inner()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.two(self.one(x))

        torch.jit.trace(Outer(), torch.ones(1)).save(path)
    return path


def main(argv: Sequence[str]) -> int:
    """Try `--count` files; the exit status says whether anything went wrong."""
    return limited.campaign("fuzz_pickles", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
