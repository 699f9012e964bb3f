"""Damaged safetensors files, flat, nested and OLMo's, and index files: refused, or read as the library reads them.

python integration_tests/reliability/fuzz_safetensors.py --count 100000 --seed 1
"""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import limited

_TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"0",
    b"-1",
    b"1e999",
    b"null",
    b"9" * 30,
    b'{"tuple":',
    b"\\ud800",
]


def case(chance: random.Random, number: int, folder: Path) -> None:
    """Damage one file and read it in every way; fails if that is wrong."""
    sources = _sources(folder)
    source = sources[number % len(sources)]
    if source.is_dir():
        _index_case(chance, source, folder / "damaged")
    else:
        place = folder / "x.safetensors"
        place.write_bytes(_damaged_file(chance, source.read_bytes()))
        _file_case(place, own_names="olmo" not in source.parts)


def _file_case(place: Path, own_names: bool) -> None:
    import safetensors.torch
    import torch

    import hf_stream
    from hf_stream.errors import HfStreamError

    ours = _values(lambda: hf_stream.open_checkpoint(place))
    for read in (hf_stream.open_nested, hf_stream.load_nested):
        with contextlib.suppress(HfStreamError, OSError):
            read(place)
    try:
        theirs = safetensors.torch.load_file(place)
    except Exception:  # noqa: BLE001  (whatever damage leads to)
        return
    if ours is not None and own_names:  # those of OLMo's files are decoded
        assert ours.keys() == theirs.keys(), "other names"
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def _index_case(chance: random.Random, source: Path, place: Path) -> None:
    import hf_stream

    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    index = next(place.glob("*.index.json"))
    index.write_bytes(_damaged_text(chance, index.read_bytes()))
    right = {name: lazy.materialize() for name, lazy in hf_stream.open_checkpoint(source).items()}
    found = _values(lambda: hf_stream.open_checkpoint(place))
    for name, tensor in (found or {}).items():
        assert tensor.equal(right[name]), name


def _values(opened: Any) -> dict[str, Any] | None:
    from hf_stream.errors import HfStreamError

    try:
        return {name: lazy.materialize() for name, lazy in opened().items()}
    except (HfStreamError, OSError):
        return None


def _damaged_file(chance: random.Random, content: bytes) -> bytes:
    """Damage anywhere, or to the header's text alone, with the right length before it."""
    from torch_files import _damaged

    if chance.random() < 0.3:
        return _damaged(content, chance)
    (length,) = struct.unpack_from("<Q", content)
    header = _damaged_text(chance, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def _damaged_text(chance: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        at, kind = chance.randrange(len(data) + 1), chance.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = chance.randrange(256)
        elif kind == 1:
            data[at : at + chance.choice([0, 1, 2, 5])] = chance.choice(_TOKENS)
        elif kind == 2:
            del data[at : at + chance.choice([1, 2, 4, 30])]
        elif kind == 3:
            data[at:at] = data[at : at + chance.choice([1, 2, 8, 40, 200])]
        elif kind == 4:
            other, size = chance.randrange(len(data) + 1), chance.choice([1, 2, 4, 8, 40])
            data[at : at + size] = data[other : other + size]
        elif digits := [n for n, byte in enumerate(data) if 48 <= byte < 58]:
            data[chance.choice(digits)] = chance.choice(b"0123456789")
    return bytes(data)


def _sources(folder: Path) -> list[Path]:
    """Right files, made when they are first needed."""
    import torch

    import hf_stream

    olmo = sorted((Path(__file__).parents[2] / "tests" / "data" / "olmo").rglob("*.safetensors"))
    paths = [folder / "flat.safetensors", folder / "nested.safetensors", folder / "sharded", *olmo]
    if not paths[0].exists():
        w = torch.arange(12.0).reshape(3, 4)
        flat = {"w": w, "b": w.bfloat16(), "n": torch.ones(2, dtype=torch.int64), "f": torch.zeros(0, 3), "s": w[0, 0]}
        hf_stream.save_checkpoint(flat, folder / "one")
        shutil.copy(next((folder / "one").glob("*.safetensors")), paths[0])
        hf_stream.save_checkpoint(flat, paths[2], max_shard_size=60)
        state = {
            "state": {
                0: {"exp_avg": w, "row": w[1], "wide": w[0, :1].expand(4, 5)},
                (1, "x"): torch.nn.Parameter(w + 1),
            },
            "keys": {None: 1, 2.5: b"\x00", True: 1 << 70, "a/b": float("nan")},
            "small": [torch.Size([2]), torch.float32, torch.device("cpu"), w.numpy(), w.numpy()[0, 0], 1j],
        }
        hf_stream.save_nested(state, paths[1])
    return paths


def main(argv: Sequence[str]) -> int:
    """Try `--count` files; the exit status says whether anything went wrong."""
    return limited.campaign("fuzz_safetensors", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
