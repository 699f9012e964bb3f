from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestings import assert_same, containers, keys, plain

from hf_stream.errors import FormatError
from hf_stream.formats.nested import MAX_DEPTH, decode_structure, dump_structure, encode_structure, parse_json
from hf_stream.formats.nested_paths import path_of

Point = namedtuple("Point", "x y")


class Color(IntEnum):
    RED = 1


def nothing(value: object, path: object) -> None:
    return None


def unknown(tag: str, content: object, path: object) -> object:
    raise FormatError(f"nothing is known of {tag!r}")


def there_and_back(state: object) -> object:
    return decode_structure(parse_json(dump_structure(encode_structure(state, nothing))), unknown)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(containers(plain, max_leaves=20))
def test_every_nesting_comes_back_as_it_was(state) -> None:
    text = dump_structure(encode_structure(state, nothing))
    text.encode()  # has no half characters, which a header could not hold
    assert_same(decode_structure(parse_json(text), unknown), state)


def test_it_reads_like_what_it_is() -> None:
    state = {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "none": None, "state": {0: math.inf, "0": 2**64}}
    assert json.loads(dump_structure(encode_structure(state, nothing))) == {
        "dict": {
            "lr": 0.1,
            "betas": {"tuple": [0.9, 0.999]},
            "params": [0, 1],
            "none": None,
            "state": {"dict": [[0, {"float": "inf"}], ["0", {"int": "0x10000000000000000"}]]},
        }
    }


def test_numbers_of_thousands_of_digits() -> None:
    assert there_and_back([10**5000, {-(10**5000): 1}]) == [10**5000, {-(10**5000): 1}]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(keys, min_size=2, max_size=8, unique=True))
def test_keys_of_one_dict_have_paths_of_their_own(some) -> None:
    paths = [path_of(["top", key]) for key in some]
    assert len(set(paths)) == len(paths)
    for path in paths:
        path.encode()
        assert path.count("/") == 1


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (["state", 0, "exp_avg"], "state/0/exp_avg"),
        (["state", "0", "exp_avg"], 'state/"0"/exp_avg'),
        (["model.layers.0.weight", "0.weight"], "model.layers.0.weight/0.weight"),
        (["a/b", None, "None"], '"a\\u002fb"/None/"None"'),
        ([("a", 1), True, 1.5, "", b"x", 2**70], '(a,1)/True/1.5/""/{"bytes":"eA=="}/{"int":"0x400000000000000000"}'),
        (["\ud800", "\U0001f600", "\u00e9"], '"\\ud800"/"\U0001f600"/\u00e9'),
        (["__metadata__"], '"__metadata__"'),
        ([], "value"),
    ],
)
def test_paths_are_readable(place, path: str) -> None:
    assert path_of(place) == path


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (Point(1, 2), "'a/1' is a Point, of which only the tuple would come back"),
        (defaultdict(list), "'a/1' is a defaultdict, of which only the dict"),
        (Color.RED, "'a/1' is a Color, of which only the int"),
        ({1, 2}, "'a/1' is a builtins.set"),
        (nothing, "'a/1' is a builtins.function"),
        ({Point(1, 2): 3}, "'a/1': the key .* is a Point"),
        ({math.nan: 3}, "'a/1': the key nan is a float; .* numbers but NaN"),
        ({(1, math.nan): 3}, "'a/1': the key .* is a tuple"),
        ({(10**5000, math.nan): 3}, "'a/1': the key a large tuple is a tuple"),
        ({Color.RED: 1}, "the key .* is a Color"),
        ({frozenset(): 1}, "the key .* is a frozenset"),
    ],
)
def test_what_would_not_come_back_is_refused_by_its_path(value, fact: str) -> None:
    with pytest.raises(FormatError, match=fact):
        encode_structure({"a": [0, value]}, nothing)


def nested(depth: int) -> object:
    state: object = 1
    for level in range(depth):
        state = [state] if level % 2 else {1: state}
    return state


def test_as_deep_as_it_may_be_and_no_deeper() -> None:
    assert there_and_back(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(FormatError, match="nests deeper than 100 levels"):
        encode_structure(nested(MAX_DEPTH + 1), nothing)
    key: tuple[object, ...] = ()
    for _ in range(9):
        key = (key,)
    assert there_and_back({key: 1}) == {key: 1}
    with pytest.raises(FormatError, match=r"the key .* is a tuple"):
        there_and_back({(key,): 1})


def test_cycles_are_refused_and_one_container_in_two_places_is_none() -> None:
    shared: list[object] = [1]
    assert there_and_back({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}
    shared.append({"x": shared})
    with pytest.raises(FormatError, match="'a/1/x' holds itself"):
        encode_structure({"a": shared}, nothing)


HOSTILE = [
    "",
    "{",
    "nul",
    "NaN",
    "[Infinity]",
    "1e999",
    "9" * 5000,
    "[" * 100_000,
    "[" * 100_000 + "]" * 100_000,
    '{"tuple":' * 400 + "[]" + "}" * 400,
    "[" * 101 + "]" * 101,
    "{}",
    '{"dict":{},"tuple":[]}',
    '{"dict":{"a":1,"a":2}}',
    '{"dict":[[0,1],[0,2]]}',
    '{"dict":[[1,1],[true,2]]}',
    '{"dict":[[1,1],[1.0,2]]}',
    '{"dict":[[0]]}',
    '{"dict":[0]}',
    '{"dict":[[{"int":"0x' + "f" * 9000 + '"},1],[{"int":"0x' + "f" * 9000 + '"},1]]}',
    '{"dict":["ab"]}',
    '{"dict":3}',
    '{"dict":[[[1],1]]}',
    '{"dict":[[{"dict":{}},1]]}',
    '{"dict":[[{"tensor":"a"},1]]}',
    '{"dict":[[{"float":"nan"},1]]}',
    '{"dict":[[{"tuple":[[]]},1]]}',
    '{"Counter":[]  ,"x":1}',
    '{"tuple":{"a":1}}',
    '{"tuple":1}',
    '{"int":"7"}',
    '{"int":"0x"}',
    '{"int":"0x_1"}',
    '{"int":7}',
    '{"int":["0x1"]}',
    '{"float":"1.5"}',
    '{"float":"infinity"}',
    '{"float":"7ff000000000000"}',
    '{"float":1.5}',
    '{"complex":[1.0]}',
    '{"complex":[1,2]}',
    '{"complex":[{"float":"nan"},{"int":"0x1"}]}',
    '{"complex":"ab"}',
    '{"complex":[1.0,{"x":"nan"}]}',
    '{"bytes":"a"}',
    '{"bytes":"a\\u00e9=="}',
    '{"bytes":1}',
    '{"bytes":["YQ=="]}',
    '{"str":"/w=="}',
    '{"os.system":"true"}',
    '{"defaultdict":{}}',
    '{"a\nb":1}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:30])
def test_what_is_no_structure_is_a_format_error(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_structure(parse_json(text), unknown)
    assert len(str(caught.value)) < 400


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(containers(plain), st.data())
def test_a_damaged_text_is_a_format_error_or_a_nesting(state, data) -> None:
    text = dump_structure(encode_structure([state], nothing))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 3)))
    damaged = text[:start] + data.draw(st.text('[]{}",:0a.-e/\\', max_size=3)) + text[stop:]
    try:
        found = decode_structure(parse_json(damaged), unknown)
    except FormatError:
        return
    assert_same(there_and_back(found), found)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
        lambda nodes: st.one_of(
            st.lists(nodes, max_size=3),
            st.dictionaries(
                st.sampled_from(["dict", "tuple", "int", "float", "str", "bytes", "complex", "OrderedDict", "a"]),
                nodes,
                max_size=2,
            ),
        ),
        max_leaves=10,
    )
)
def test_any_json_is_a_format_error_or_a_nesting(tree) -> None:
    try:
        found = decode_structure(parse_json(json.dumps(tree)), unknown)
    except FormatError:
        return
    assert_same(there_and_back(found), found)


def test_what_others_add_is_asked_of_the_caller() -> None:
    seen = []

    def encode(value: object, place) -> dict[str, str] | None:
        seen.append(path_of(place))
        return {"set": repr(value)} if isinstance(value, set) else None

    state = {"a": [{1}], "b": OrderedDict(c={2}), "n": Counter("x")}
    tree = parse_json(dump_structure(encode_structure(state, encode)))
    assert seen == ["a/0", "b/c"]
    found = decode_structure(tree, lambda tag, content, place: (tag, content, path_of(place)))
    assert found == {
        "a": [("set", "{1}", "a/0")],
        "b": OrderedDict(c=("set", "{2}", "b/c")),
        "n": Counter("x"),
    }
