from __future__ import annotations

import itertools
import random
import struct
import sys

import pytest

from hf_stream.errors import FormatError
from hf_stream.formats.budget import FLOOR, RATE, Budget
from hf_stream.formats.key_table import KeyTable, check_collisions
from hf_stream.formats.nested import decode_structure, encode_structure, parse_json
from hf_stream.formats.nested_paths import PathNames
from hf_stream.formats.plain_pickle import read_plain
from hf_stream.formats.torch_pickle import TorchPickle

P = sys.hash_info.modulus


def test_a_budget_is_in_proportion_to_the_file() -> None:
    budget = Budget(1000)
    budget.spend(FLOOR + RATE * 1000)
    with pytest.raises(FormatError, match=f"larger than {FLOOR + RATE * 1000} bytes"):
        budget.spend(1)


def clashing(n: int) -> list[tuple[int, ...]]:
    """Tuples of one hash."""
    return list(itertools.islice(itertools.product([0, P, 2 * P, 3 * P], repeat=8), n))


@pytest.mark.parametrize(
    "keys",
    [
        range(100_000),
        range(100_000, 0, -1),
        [n << 40 for n in range(20_000)],
        [n / 1024 for n in range(100_000)],
        [n / 8192 for n in range(8192)],
        [n / 2**17 for n in range(20_000)],
        [n / 2**23 for n in range(20_000)],
        [n << 42 for n in range(20_000)],
        [(i << 32) | j for i in range(140) for j in range(140)],
        [float(n) for n in range(50_000)],
        [random.Random(n).getrandbits(62) for n in range(20_000)],
        [(n, "a") for n in range(20_000)],
        [("a", n, None) for n in range(20_000)],
        [None, True, False, 2.5, -1, -2, b"x"],
    ],
)
def test_ordinary_keys_pass(keys) -> None:
    check_collisions(keys)


def test_a_table_takes_the_steps_that_a_dict_takes() -> None:
    class Key:
        compared = 0

        def __init__(self, hashed: int) -> None:
            self.hashed = hashed

        def __hash__(self) -> int:
            return self.hashed

        def __eq__(self, other: object) -> bool:
            Key.compared += 1
            return self is other

    keys = [Key(n % 3) for n in range(100)]
    table, there = KeyTable(), {}
    for key in keys:
        before = Key.compared
        there[key] = None
        steps, Key.compared = Key.compared - before, 0
        assert steps <= 33
        table.add(key)
    assert table._steps > sum(n // 3 for n in range(100))


def long(number: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", number)


def as_pickle(keys: list[tuple[int, ...]]) -> bytes:
    return b"\x80\x02}(" + b"".join(b"(" + b"".join(map(long, key)) + b"tN" for key in keys) + b"u."


def test_colliding_keys_are_refused_wherever_they_stand() -> None:
    few, many = clashing(50), clashing(1000)
    assert len({hash(key) for key in many}) == 1
    assert read_plain(as_pickle(few)) == dict.fromkeys(few)
    for make in (
        lambda: read_plain(as_pickle(many)),
        lambda: TorchPickle(Budget(1 << 20)).read(as_pickle(many), "x"),
        lambda: TorchPickle(Budget(1 << 20)).read(
            b"\x80\x02ccollections\nOrderedDict\n" + as_pickle(many)[2:-1] + b"\x85R.", "x"
        ),
        lambda: TorchPickle(Budget(1 << 20)).read(
            b"\x80\x02cbuiltins\nset\n]("
            + b"".join(b"(" + b"".join(map(long, key)) + b"t" for key in many)
            + b"e\x85R.",
            "x",
        ),
        lambda: decode_structure(
            parse_json('{"dict":[' + ",".join(f'[{{"tuple":{list(key)}}},0]' for key in many) + "]}"), lambda *_: None
        ),
    ):
        with pytest.raises(FormatError, match="hashes collide"):
            make()


def test_keys_that_collide_with_text_between_them_are_refused_too() -> None:
    keys = [key for pair in zip(clashing(1000), map(str, range(1000)), strict=True) for key in pair]
    with pytest.raises(FormatError, match="hashes collide"):
        check_collisions(keys)


@pytest.mark.parametrize(
    "data", [b"(" + b"]" * 1_000_000 + b"t.", b"(" + b"N\x85" * 1_000_000 + b"t.", b"(" + b"}" * 1_000_000 + b"t."]
)
def test_containers_take_their_part_of_the_budget(data: bytes) -> None:
    for read in (read_plain, lambda data: TorchPickle(Budget(len(data))).read(b"\x80\x02" + data, "x")):
        with pytest.raises(FormatError, match="larger than"):
            read(data)


def test_large_keys_that_are_used_again_and_again_take_their_part_of_the_budget() -> None:
    """Each time takes two bytes of the pickle, and the work for a hundred values."""
    key = b"(" + b"N" * 97 + b"tq\x00"
    items = b"](" + key + b"h\x00" * 10_000 + b"e"
    pairs = b"]((" + key + b"Nt" + b"h\x00N\x86" * 10_000 + b"e"
    for data in (
        b"}(" + key + b"N" + b"h\x00N" * 10_000 + b"u.",
        b"cbuiltins\nset\n" + items + b"\x85R.",
        b"ccollections\nOrderedDict\n" + pairs + b"\x85R.",
    ):
        with pytest.raises(FormatError, match="larger than"):
            TorchPickle(Budget(len(data))).read(b"\x80\x02" + data, "x")
    with pytest.raises(FormatError, match="larger than"):
        read_plain(b"}(" + key + b"N" + b"h\x00N" * 10_000 + b"u.")


@pytest.mark.parametrize("data", [b"Np70000\n.", b"Nr\x00\x00\x01\x00."])
def test_a_memo_has_no_places_far_out(data: bytes) -> None:
    with pytest.raises(FormatError, match="place"):
        read_plain(data)
    assert read_plain(b"](Nq\x01h\x01e.") == [None, None]


def test_what_is_shared_is_written_a_few_times_and_not_without_end() -> None:
    state: list[object] = [1.5]
    for _ in range(60):
        state = [state, state]
    with pytest.raises(FormatError, match="several places"):
        encode_structure(state, lambda *_: None)
    with pytest.raises(FormatError, match="several places"):
        encode_structure(["x" * 1_000_000] * 100, lambda *_: None)
    betas = (0.9, 0.999)
    assert encode_structure([betas] * 1000, lambda *_: None) == [{"tuple": [0.9, 0.999]}] * 1000


def test_long_paths_are_counted() -> None:
    names = PathNames()
    assert names(["a", 0]) == "a/0"
    for n in range(100_000):
        names(["state", n, "x" * 150])
    for _ in range(1000):
        names(["k" * 10_000, 1])
    with pytest.raises(FormatError, match="paths of the tensors"):
        names(["k" * (1 << 24), "k" * (1 << 24)])
