from __future__ import annotations

import io
import pickle
import pickletools
import random
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestings import assert_same, floats, ints, texts

from hf_stream.errors import FormatError
from hf_stream.formats.nested import MAX_DEPTH
from hf_stream.formats.plain_pickle import read_plain

scalars = st.one_of(st.none(), st.booleans(), ints, floats, texts, st.binary(max_size=300))
int64s = st.integers(-(2**63), 2**63 - 1)
keys = st.one_of(texts, int64s, st.none(), st.booleans(), st.tuples(texts, int64s))


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda items: st.one_of(
            st.lists(items, max_size=4),
            st.lists(items, max_size=4).map(tuple),
            st.dictionaries(keys, items, max_size=4),
        ),
        max_leaves=12,
    )


class Refusing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


class Patient(pickle._Unpickler):  # type: ignore[name-defined]
    find_class = Refusing.find_class


def by_pickle(data: bytes) -> Any:
    try:
        return Refusing(io.BytesIO(data)).load()
    except MemoryError:  # it has room for each number up to the largest in its memo
        return Patient(io.BytesIO(data)).load()


@given(values(scalars), st.integers(3, 5))
def test_plain_values_of_newer_protocols_come_back(value, protocol):
    assert_same(read_plain(pickle.dumps(value, protocol)), value)


# Bytes are calls of a function there, and NaNs are words.
@given(values(scalars.filter(lambda x: type(x) is not bytes and x == x)), st.integers(0, 2))
def test_plain_values_of_older_protocols_come_back(value, protocol):
    data = pickle.dumps(value, protocol)
    try:
        found = read_plain(data)
    except FormatError as error:
        # Pickle ends a line of text at any line feed, and escapes none but that in protocol 0.
        pytest.fail(f"{data!r}: {error}")
    assert_same(found, value)


@pytest.mark.parametrize("protocol", range(6))
def test_what_occurs_twice_is_shared(protocol):
    betas = (0.9, 0.999)
    found = read_plain(pickle.dumps([betas, betas, "x" * 3], protocol))
    assert found == [betas, betas, "xxx"]
    assert found[0] is found[1]


def test_values_that_need_the_longest_opcodes():
    for value in ("a" * 70_000, b"a" * 70_000, 1 << 3000, -(1 << 3000), list(range(2000)), {i: i for i in range(2000)}):
        for protocol in (3, 4, 5):
            assert read_plain(pickle.dumps(value, protocol)) == value
    for opcode, value in ((pickle.BINUNICODE8, "ab"), (pickle.BINBYTES8, b"ab")):
        assert read_plain(opcode + (2).to_bytes(8, "little") + b"ab.") == value


PLAIN = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4
FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE
"""


@pytest.mark.parametrize("name", sorted({opcode.name for opcode in pickletools.opcodes} - set(PLAIN.split())))
def test_every_other_opcode_is_refused_by_name(name):
    (opcode,) = (opcode for opcode in pickletools.opcodes if opcode.name == name)
    # Enough on the stack and after the opcode for each of them.
    data = b"(" + b"\x8c\x02os\x8c\x06system" + opcode.code.encode("latin-1") + b"posix\nsystem\n" + b"\x00" * 8 + b"."
    with pytest.raises(FormatError, match=rf"\({name}\); nothing was looked up or run"):
        read_plain(data)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"cposix\nsystem\n(S'true'\ntR.", "'posix.system'"),
        (pickle.dumps(print, 4), "'builtins.print'"),
        (pickle.dumps({1, 2}, 0), "set"),
        (pickle.dumps(2j, 4), "'builtins.complex'"),
        (pickle.dumps({1, 2}, 4), "not plain"),
    ],
)
def test_what_a_pickle_wanted_is_named(data, named):
    with pytest.raises(FormatError, match=named):
        read_plain(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"N",
        b"NN.",
        b"(N.",
        b"N.N",
        b"K.",
        b"J\x00\x00.",
        b"]}e.",
        b"}(K\x01u.",
        b"}]K\x01s.",
        b"}}K\x01s.",
        b"h\x00.",
        b"0.",
        b"\x80\x06N.",
        b"\x95\xff\x00\x00\x00\x00\x00\x00\x00N.",
        b"X\xff\xff\xff\xffab.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffab.",
        b"\x8b\xff\xff\xff\xffab.",
        b"\x8c\x02\xff\xff.",
        b"I012\n.",
        b"I0x12\n.",
        b"I1_0\n.",
        b"L--1L\n.",
        b"F1_0\n.",
        b"F 1\n.",
        b"I" + b"1" * 20_000 + b"\n.",
        b"gx\n.",
        b"\x7fN.",
    ],
)
def test_damaged_pickles_are_refused(data):
    with pytest.raises(FormatError):
        read_plain(data)


def test_deep_values():
    assert read_plain(chain(MAX_DEPTH, b"N") + b".") is not None
    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(FormatError, match="deeper"):
            read_plain(chain(levels, b"N") + b".")


def chain(levels: int, end: bytes) -> bytes:
    """A tuple in a tuple in ... around `end`."""
    return end + b"\x85" * levels


def test_depth_counts_what_is_shared_too():
    # Each of three chains is shallow where it stands; the third ends in the second, which ends in the first.
    first = chain(60, b"N") + b"q\x00"
    second = chain(60, b"h\x00") + b"q\x01"
    with pytest.raises(FormatError, match="deeper"):
        read_plain(b"(" + first + second + b"t.")


def test_a_value_that_holds_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(FormatError, match="holds itself"):
        read_plain(pickle.dumps(loop))
    inner: dict[str, Any] = {}
    inner["a"] = ([inner],)
    with pytest.raises(FormatError, match="holds itself"):
        read_plain(pickle.dumps(inner))


DOUBLING = {
    "tuples": b"N" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b".",
    "lists": b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(60)) + b".",
    "keys": b"}N" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"Ns.",
    "text": b"]X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"\x940(" + b"h\x00" * 1000 + b"e.",
    "dup": b"N" + b"2\x86" * 60 + b".",
    "keys of one hash": b"}("
    + b"".join(b"\x8a\x10" + (i * sys.hash_info.modulus).to_bytes(16, "little") + b"N" for i in range(1, 50_000))
    + b"u.",
    "one long key for many values": b"((" + b"K\x01" * 9990 + b"tq\x08}(" + b"h\x08N" * 100_000 + b"ut.",
}


@pytest.mark.parametrize("name", DOUBLING)
def test_what_would_grow_without_measure_is_refused(name):
    with pytest.raises(FormatError, match=r"larger|deeper|is no key|made of more"):
        read_plain(DOUBLING[name])


def test_keys_that_could_all_have_one_hash_are_refused():
    clash = sys.hash_info.modulus
    for key in (2**63, (1, ("a", -(2**63) - 1)), clash << 70):
        with pytest.raises(FormatError, match=r"a number of .* is no key"):
            read_plain(pickle.dumps({key: 1}))
    assert read_plain(pickle.dumps({2**63 - 1: 1 << 90, -(2**63): 2})) == {2**63 - 1: 1 << 90, -(2**63): 2}


def test_containers_are_counted():
    assert len(read_plain(b"(" + b"]" * 99_999 + b"t.")) == 99_999
    with pytest.raises(FormatError, match="larger than"):
        read_plain(b"(" + b"]" * 1_000_000 + b"t.")


def mutated(data: bytes, chance: random.Random) -> bytes:
    content = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        at = chance.randrange(len(content))
        way = chance.randrange(5)
        if way == 0:
            content[at] = chance.randrange(256)
        elif way == 1:
            content[at] ^= 1 << chance.randrange(8)
        elif way == 2:
            del content[at : at + chance.randrange(1, 5)]
        elif way == 3:
            content[at:at] = chance.choice(pickletools.opcodes).code.encode("latin-1")
        else:
            other = chance.randrange(len(content))
            content[at:at] = content[other : other + chance.randrange(1, 9)]
        if not content:
            return b"."
    return bytes(content)


SEEDS = [
    (("optim", "state", 0, "exp_avg"), False),
    [{"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "foreach": None, "params": [0, 1, 2], "name": "decay"}] * 2,
    {"a": [1, -1, 300, 70000, 1 << 40, 1 << 80], "b": b"\x00\xff", (1, "x"): {"": ()}, None: True, 2.5: "\u00fc"},
]


@pytest.mark.parametrize("protocol", range(6))
def test_mutated_pickles_raise_or_give_what_pickle_gives(protocol):
    chance = random.Random(protocol)
    read = refused = 0
    # The last one has bytes, for which protocols before 3 have no opcode.
    for seed in SEEDS[: None if protocol > 2 else -1]:
        data = pickle.dumps(seed, protocol)
        for _ in range(1500):
            content = mutated(data, chance)
            tracemalloc.start()
            try:
                found = read_plain(content)
            except FormatError:
                refused += 1
                continue
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < 1 << 20
            read += 1
            wanted = by_pickle(content)
            assert repr(found) == repr(wanted)
    assert read > 100
    assert refused > 1000
