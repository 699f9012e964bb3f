"""A pickle of plain values read as data: None, bools, numbers, text, bytes, and lists, tuples and dicts of these.

No opcode here imports, calls or builds anything: such a pickle is refused, with the name of what it wanted.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any, Final, NoReturn

from hf_stream.errors import FormatError
from hf_stream.formats.budget import Budget
from hf_stream.formats.key_table import KEY_PART, KeyTable
from hf_stream.formats.nested import MAX_DEPTH
from hf_stream.formats.nested_scalars import is_key

# Bytes of memory.
_CONTAINER: Final = 160
_DICT_ITEM: Final = 96
_MAX_MARKS: Final = 100_000
_MAX_LINE: Final = 10_000
_MAX_KEY_SIZE: Final = 100
# Larger ones are no keys of anything.
_KEY_NUMBERS: Final = range(-(2**63), 2**63)
_NO_NUMBER: Final = "the pickle is damaged: no number where one must be"
_PROTOCOLS: Final = range(6)
_DECIMAL: Final = re.compile(rb"0|-?[1-9][0-9]*")
_DECIMAL_POINT: Final = re.compile(rb"[-+.0-9e]+|-?inf|-?nan")


def read_plain(data: bytes, budget: Budget | None = None) -> Any:
    """The value that a pickle of plain values tells.

    Args:
        data: The pickle, of protocol 0 to 5, and nothing after it.
        budget: What is left for the file that the pickle is in; by default, what a file of the pickle alone has.

    Raises:
        FormatError: It is damaged, holds anything else, holds itself, nests too deep, or is much larger than the file.
    """
    budget = budget or Budget(len(data))
    machine = _Machine(data, budget)
    try:
        value = machine.run()
        # A value may be shared, and so be larger when it is written out than it is here.
        size, _ = _written_out(value, {}, 0)
        budget.spend(size)
    except FormatError:
        raise
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error):
        raise FormatError(f"the pickle is damaged at its byte {machine.at}") from None
    return value


class _Machine:
    """The stack machine that a pickle is a program for.

    Attributes:
        at: The next byte.
    """

    def __init__(self, data: bytes, budget: Budget) -> None:
        self.at = 0
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: list[Any] = []
        self._memoized = 0  # places of the memo that are taken
        self._tables: dict[int, KeyTable] = {}  # of dicts that have other keys than text, by their ids
        self._spend = budget.spend
        self._frame_stop: int | None = None

    def run(self) -> Any:
        data, steps = self._data, _STEPS
        while True:
            if self._frame_stop is not None and self.at >= self._frame_stop:
                self._end_frame()
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                break
            step = steps.get(opcode)
            if step is None:
                self._refuse(opcode)
            step(self)
        if self._marks or len(self._stack) != 1 or self.at != len(data):
            raise FormatError("the pickle does not end with one value")
        return self._stack.pop()

    def _refuse(self, opcode: int) -> NoReturn:
        name = _NAMES.get(opcode)
        if name is None:
            raise FormatError(f"the pickle is damaged: {bytes([opcode])!r} is no opcode")
        what = "an object that is not plain"
        if name == "GLOBAL":
            what = f"{(self._line() + b'.' + self._line()).decode('ascii', 'replace')!r:.200}"
        elif name == "STACK_GLOBAL":
            module, attribute = self._stack[-2:]
            if type(module) is type(attribute) is str:
                what = f"{f'{module}.{attribute}'!r:.200}"
        raise FormatError(f"the pickle wants to make {what} ({name}); nothing was looked up or run")

    # What follows an opcode.

    def _take(self, nbytes: int) -> bytes:
        data = self._data[self.at : self.at + nbytes]
        if len(data) < nbytes:
            raise FormatError("the pickle ends too early")
        self.at += nbytes
        return data

    def _number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._data, self.at)
        self.at += form.size
        return value

    def _line(self) -> bytes:
        stop = self._data.find(b"\n", self.at, self.at + _MAX_LINE)
        if stop < 0:
            raise FormatError("the pickle has a line that does not end")
        line = self._data[self.at : stop]
        self.at = stop + 1
        return line

    def _count(self) -> int:
        line = self._line()
        if not line.isdigit():
            raise FormatError(_NO_NUMBER)
        return int(line)

    def pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def new(self, container: Any) -> None:
        self._spend(_CONTAINER)
        self._stack.append(container)

    # What opcodes do, in the order of pickle's documentation.

    def proto(self) -> None:
        if self._take(1)[0] not in _PROTOCOLS:
            raise FormatError(f"the pickle is of protocol {self._data[self.at - 1]}, the newest known is 5")

    def frame(self) -> None:
        nbytes = self._number(_UINT8)
        if self._frame_stop is not None or self.at + nbytes > len(self._data):
            raise FormatError("the pickle is damaged: a frame in a frame, or one that is not whole")
        self._frame_stop = self.at + nbytes

    def _end_frame(self) -> None:
        if self.at != self._frame_stop:
            raise FormatError("the pickle is damaged: an opcode goes beyond its frame")
        self._frame_stop = None

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []
        if len(self._marks) > _MAX_MARKS:
            raise FormatError(f"more than {_MAX_MARKS} containers are open at once")

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.pop_mark()

    def drop_mark(self) -> None:
        self.pop_mark()

    def dup(self) -> None:
        self._stack.append(self._stack[-1])

    def int_line(self) -> None:
        line = self._line()
        # Bools of protocols 0 and 1.
        self._stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else _decimal(line))

    def long_line(self) -> None:
        self._stack.append(_decimal(self._line().removesuffix(b"L")))

    def float_line(self) -> None:
        line = self._line()
        if not _DECIMAL_POINT.fullmatch(line):
            raise FormatError(_NO_NUMBER)
        self._stack.append(float(line))

    def text_line(self) -> None:
        self._stack.append(str(self._line(), "raw-unicode-escape"))

    def append(self) -> None:
        self._extend([self._stack.pop()])

    def appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise FormatError("the pickle is damaged: it appends to what is no list")
        self._stack[-1].extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise FormatError("the pickle is damaged: it sets items of what is no dict")
        self._spend(_DICT_ITEM * (len(items) // 2))
        table = self._tables.get(id(target))
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                self._spend(KEY_PART * check_plain_key(key))
                if table is None:
                    table = self._tables[id(target)] = KeyTable(target)
            if table is not None:
                table.add(key)
            target[key] = value

    def make_dict(self) -> None:
        items = self.pop_mark()
        self.new({})
        self._set(items)

    def make_tuple(self, size: int) -> None:
        items = self._stack[-size:]
        if len(items) < size:
            raise FormatError("the pickle is damaged: it has too few values for a tuple")
        del self._stack[-size:]
        self.new(tuple(items))

    def get(self, index: int) -> None:
        value = self._memo[index]
        if value is _NOTHING:
            raise FormatError(f"the pickle is damaged: place {index} of its memo is empty")
        self._stack.append(value)

    def put(self, index: int) -> None:
        # Writers number the places one after another. A list, as the keys of a dict could be made to collide.
        if index > self.at:
            raise FormatError(f"the pickle is damaged: it uses place {index} of its memo at byte {self.at}")
        memo = self._memo
        if index >= len(memo):
            memo.extend([_NOTHING] * (index + 1 - len(memo)))
        self._memoized += memo[index] is _NOTHING
        memo[index] = self._stack[-1]

    def memoize(self) -> None:
        self.put(self._memoized)

    def push(self, value: Any) -> None:
        self._stack.append(value)


def check_plain_key(key: Any) -> int:
    """Refuse what is no key of a nested state; tuples in tuples, large when they are hashed, are seen before that.

    Returns:
        Of how many values it is made.

    Raises:
        FormatError: It is none.
    """
    todo, size = [key], 0
    while todo:
        item = todo.pop()
        size += 1
        if type(item) is tuple:
            todo += item[:_MAX_KEY_SIZE]
        elif type(item) is int and item not in _KEY_NUMBERS:
            raise FormatError(f"a number of {item.bit_length()} bits is no key, or part of one")
        if size > _MAX_KEY_SIZE:
            raise FormatError(f"a key is made of more than {_MAX_KEY_SIZE} values")
    if not is_key(key):
        raise FormatError(f"a {type(key).__name__} is no key: these are text, bytes, numbers, None and tuples of them")
    return size


def _decimal(line: bytes) -> int:
    if not _DECIMAL.fullmatch(line):
        raise FormatError(_NO_NUMBER)
    return int(line)


def _written_out(value: Any, known: dict[int, tuple[int, int] | None], depth: int) -> tuple[int, int]:
    """The value's size in bytes or so when it is written out, and how many levels it has.

    Raises:
        FormatError: It holds itself, or nests too deep.
    """
    kind = type(value)
    if kind is str or kind is bytes:
        return 1 + len(value), 0
    if kind is int:
        return 1 + value.bit_length() // 8, 0
    if kind not in (list, tuple, dict):
        return 1, 0
    found = known.get(id(value), _NOT_KNOWN)
    if found is None:
        raise FormatError("the value holds itself")
    if depth + found[1] > MAX_DEPTH:
        raise FormatError(f"the value nests deeper than {MAX_DEPTH} levels")
    if found is _NOT_KNOWN:
        known[id(value)] = None
        size, levels = 1, 0
        for item in (*value.keys(), *value.values()) if kind is dict else value:
            more, below = _written_out(item, known, depth + 1)
            size, levels = size + more, max(levels, below)
        found = known[id(value)] = size, levels + 1
    return found


_NOT_KNOWN: Final = (0, 1)
_NOTHING: Final = object()

_UINT1: Final = struct.Struct("<B")
_UINT2: Final = struct.Struct("<H")
_INT4: Final = struct.Struct("<i")
_UINT4: Final = struct.Struct("<I")
_UINT8: Final = struct.Struct("<Q")
_FLOAT: Final = struct.Struct(">d")

_Step = Callable[[_Machine], None]


def _constant(value: Any) -> _Step:
    return lambda machine: machine.push(value)


def _number(form: struct.Struct) -> _Step:
    return lambda machine: machine.push(machine._number(form))


def _sized(form: struct.Struct, read: Callable[[bytes], Any]) -> _Step:
    return lambda machine: machine.push(read(machine._take(machine._number(form))))


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _memo(use: Callable[[_Machine, int], None], form: struct.Struct | None) -> _Step:
    return lambda machine: use(machine, machine._count() if form is None else machine._number(form))


_NAMES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_STOP: Final = pickle.STOP[0]
_STEPS: Final[dict[int, _Step]] = {
    opcode[0]: step
    for opcode, step in (
        (pickle.PROTO, _Machine.proto),
        (pickle.FRAME, _Machine.frame),
        (pickle.MARK, _Machine.mark),
        (pickle.POP, _Machine.pop),
        (pickle.POP_MARK, _Machine.drop_mark),
        (pickle.DUP, _Machine.dup),
        (pickle.NONE, _constant(None)),
        (pickle.NEWTRUE, _constant(True)),
        (pickle.NEWFALSE, _constant(False)),
        (pickle.INT, _Machine.int_line),
        (pickle.BININT, _number(_INT4)),
        (pickle.BININT1, _number(_UINT1)),
        (pickle.BININT2, _number(_UINT2)),
        (pickle.LONG, _Machine.long_line),
        (pickle.LONG1, _sized(_UINT1, pickle.decode_long)),
        (pickle.LONG4, _sized(_UINT4, pickle.decode_long)),
        (pickle.FLOAT, _Machine.float_line),
        (pickle.BINFLOAT, _number(_FLOAT)),
        (pickle.UNICODE, _Machine.text_line),
        (pickle.SHORT_BINUNICODE, _sized(_UINT1, _text)),
        (pickle.BINUNICODE, _sized(_UINT4, _text)),
        (pickle.BINUNICODE8, _sized(_UINT8, _text)),
        (pickle.SHORT_BINBYTES, _sized(_UINT1, bytes)),
        (pickle.BINBYTES, _sized(_UINT4, bytes)),
        (pickle.BINBYTES8, _sized(_UINT8, bytes)),
        (pickle.EMPTY_TUPLE, _constant(())),
        (pickle.TUPLE1, lambda machine: machine.make_tuple(1)),
        (pickle.TUPLE2, lambda machine: machine.make_tuple(2)),
        (pickle.TUPLE3, lambda machine: machine.make_tuple(3)),
        (pickle.TUPLE, lambda machine: machine.new(tuple(machine.pop_mark()))),
        (pickle.EMPTY_LIST, lambda machine: machine.new([])),
        (pickle.LIST, lambda machine: machine.new(machine.pop_mark())),
        (pickle.APPEND, _Machine.append),
        (pickle.APPENDS, _Machine.appends),
        (pickle.EMPTY_DICT, lambda machine: machine.new({})),
        (pickle.DICT, _Machine.make_dict),
        (pickle.SETITEM, _Machine.set_item),
        (pickle.SETITEMS, _Machine.set_items),
        (pickle.GET, _memo(_Machine.get, None)),
        (pickle.BINGET, _memo(_Machine.get, _UINT1)),
        (pickle.LONG_BINGET, _memo(_Machine.get, _UINT4)),
        (pickle.PUT, _memo(_Machine.put, None)),
        (pickle.BINPUT, _memo(_Machine.put, _UINT1)),
        (pickle.LONG_BINPUT, _memo(_Machine.put, _UINT4)),
        (pickle.MEMOIZE, _Machine.memoize),
    )
}
