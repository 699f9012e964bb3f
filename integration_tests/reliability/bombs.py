"""Small files that were made to take much memory or time: each is refused, or read within limits in proportion to it.

python integration_tests/reliability/bombs.py --count 200 --seed 1
"""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import limited

_P = sys.hash_info.modulus


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _long(number: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", number)


def _arguments(size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The arguments of a tensor on storage "0" of three bytes."""
    storage = b"(" + _text("storage") + b"ctorch\nByteStorage\n" + _text("0") + _text("cpu") + b"K\x03tQ"
    sizes = [b"(" + b"".join(map(_long, numbers)) + b"t" for numbers in (size, stride)]
    return b"(" + storage + b"K\x00" + b"".join(sizes) + b"\x89ccollections\nOrderedDict\n)Rt"


_NAMED = b"cos\nsystem\nq\x05"
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\nq\x02"


def _tensor(size: tuple[int, ...] = (3,), stride: tuple[int, ...] = (1,)) -> bytes:
    return _REBUILD + _arguments(size, stride) + b"q\x03R"


def _with_tensor(value: bytes) -> bytes:
    return b"\x80\x02}" + _text("w") + _tensor() + b"s" + _text("n") + value + b"s."


def _keys_of_one_hash(n: int) -> bytes:
    zeros = itertools.product([0, _P, 2 * _P, 3 * _P], repeat=10)
    return b"}(" + b"".join(b"(" + b"".join(map(_long, key)) + b"tN" for key in itertools.islice(zeros, n)) + b"u"


def _modules(n: int) -> bytes:
    head = b"\x80\x02c__torch__\nM\n)\x81}(" + _text("k") + _tensor() + b"q\x05" + _text("a" * 500) + b"q\x01"
    return head + (b"c__torch__\nM\n)\x81}(" + _text("t") + b"h\x05h\x01") * n + b"N" + b"ub" * n + b"ub."


# Each gives a pickle of about so many kilobytes.
PICKLES: dict[str, Callable[[int], bytes]] = {
    "empty dicts": lambda k: _with_tensor(b"](" + b"}" * (k << 10) + b"e"),
    "empty sets": lambda k: _with_tensor(b"](" + b"\x8f" * (k << 10) + b"e"),
    "tuples": lambda k: _with_tensor(b"](" + b"N\x85" * (k << 9) + b"e"),
    "brackets": lambda k: b"\x80\x02" + b"(" * (k << 10) + b".",
    "nothing": lambda k: _with_tensor(b"](" + b"N" * (k << 10) + b"e"),
    "nothing, deep down": lambda k: _with_tensor(b"]" * 90 + b"(" + b"N" * (k << 10) + b"e" + b"a" * 89),
    "keys of one hash": lambda k: _with_tensor(_keys_of_one_hash(k * 10)),
    "expanded": lambda k: b"\x80\x02}" + _text("w" * k) + _tensor((k << 24, 2), (0, 1)) + b"s.",
    "doubling": lambda k: _with_tensor(_tensor() + b"".join(b"q%ch%c\x86" % (n, n) for n in range(10, 70 + k % 30))),
    "long paths": lambda k: _with_tensor(
        b"}" + _text("k" * (k << 8)) + b"q\x01" + b"}h\x01" * 40 + b"](" + b"h\x02h\x03R" * (k << 6) + b"e" + b"s" * 41
    ),
    "far memo": lambda k: _with_tensor(b"N" + b"".join(b"r" + struct.pack("<I", n << 20) for n in range(4000))),
    "sets of attributes": lambda k: (
        b"\x80\x02](" + _tensor() + b"}" + _text("a") + b"](" + b"N" * (k << 10) + b"eq\x05s"
        + b"".join(
            b"ctorch._tensor\n_rebuild_from_type_v2\n(h\x02ctorch\nTensor\nh\x03}" + _text("a") + b"h\x05stR"
            for _ in range(k)
        )
        + b"e."
    ),
    "deflated": lambda k: _with_tensor(b"](" + b"}" * (k << 14) + b"e"),
    "modules": lambda k: _modules(k << 4),
    "objects": lambda k: _with_tensor(b"](" + _NAMED + b"h\x05)R" * (k << 8) + b"e"),
    "names": lambda k: _with_tensor(b"](" + b"ca\nb\n" * (k * 200) + b"e"),
    "objects in objects": lambda k: _with_tensor(_NAMED + b")\x81" + b"h\x05)\x81" * (k << 8) + b"b" * (k << 8)),
    "objects for keys": lambda k: _with_tensor(b"}(" + _NAMED + b"N" + b"h\x05)RN" * (k << 8) + b"u"),
    "objects for parts of keys": lambda k: _with_tensor(
        b"}((" + _NAMED + b"t" + _NAMED + (b"(" + b"h\x05)R" * 90 + b"tN") * (k * 3) + b"u"
    ),
    "given to many": lambda k: _with_tensor(
        b"](]q\x06(" + b"]" * (k << 8) + b"e" + _NAMED + b"h\x05h\x06\x85R" * (k << 7) + b"e"
    ),
    "given what collides": lambda k: _with_tensor(_NAMED + b")\x81" + _keys_of_one_hash(k * 10)[1:]),
}  # fmt: skip


def _write(name: str, k: int, place: Path) -> None:
    records = {"data.pkl": PICKLES[name](k), "byteorder": b"little", "version": b"3\n", "data/0": b"abc"}
    if name == "modules":
        records["constants.pkl"] = b"\x80\x02)."
    method = zipfile.ZIP_DEFLATED if name == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(place, "w", method) as archive:
        for record, content in records.items():
            archive.writestr(f"archive/{record}", content)


def case(chance: random.Random, number: int, folder: Path) -> None:
    """Read one bomb of a random size in every way, within 100 times its size and 80 MiB of memory."""
    import resource

    from memory_peaks import peak_of

    import hf_stream
    import hf_stream.checkpoint  # what it imports is not the first bomb's
    from hf_stream.errors import HfStreamError

    place, out = folder / "bomb.pt", folder / "out.safetensors"
    _write(list(PICKLES)[number % len(PICKLES)], chance.choice([10, 100, 300, 1000]), place)
    size = place.stat().st_size
    limited.within_limits(7 + size // 70_000)
    ways = {
        "open_checkpoint": lambda: dict(hf_stream.open_checkpoint(place)),
        "open_nested": lambda: hf_stream.open_nested(place),
        "open_checkpoint, skipping": lambda: dict(hf_stream.open_checkpoint(place, skip_unreadable=True)),
        "load_nested, skipping": lambda: hf_stream.load_nested(place, skip_unreadable=True),
        "load_nested": lambda: hf_stream.load_nested(place),
        "save_nested": lambda: hf_stream.save_nested(hf_stream.open_nested(place), out),
        "convert": lambda: hf_stream.convert(place, folder / "converted"),
    }

    for name, way in ways.items():

        def work(way: Callable[[], object] = way) -> None:
            with contextlib.suppress(HfStreamError, OSError):
                way()

        peak = peak_of(work)
        limit = 100 * size + (80 << 20)
        assert peak < limit, f"{name} takes {peak} bytes for a bomb of {size}"
        written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        assert written < limit, f"{name} writes {written} bytes for a bomb of {size}"
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main(argv: Sequence[str]) -> int:
    """Try `--count` bombs; the exit status says whether anything went wrong."""
    return limited.campaign("bombs", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
