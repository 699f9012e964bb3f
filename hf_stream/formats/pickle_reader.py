"""A pickle read as data: containers and plain values, and calls of the few functions that the reader was given.

The opcodes are those that `torch.load(weights_only=True)` knows, no others. A name in the pickle is a key of a table:
nothing is imported and no attribute is looked up. What is not in the table may stand for itself: what the pickle would
call it with is kept and looked at no further. What is built is counted before it is made.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from hf_stream.errors import FormatError, PickleError
from hf_stream.formats.budget import Budget
from hf_stream.formats.key_table import PLAIN_KEYS, KeyTable, check_key
from hf_stream.formats.pickle_objects import CALL, Function, Inert, InertClass

_INT: Final = struct.Struct("<i")
_LENGTH: Final = struct.Struct("<I")
_SHORT: Final = struct.Struct("<H")
_FLOAT: Final = struct.Struct(">d")

_NEWEST_PROTOCOL: Final = 3  # later ones use opcodes that torch's reader does not know
_MAX_NAME: Final = 1000
_DICTS: Final = (dict, OrderedDict, Counter)
_SIZED: Final = frozenset({*_DICTS, list, tuple, set, str, bytes, bytearray})
_MAX_MARKS: Final = 100_000
_NOT_MADE: Final = (Inert, InertClass)
# Bytes of memory, with what is made of it later: a container, an item of a dict.
_CONTAINER: Final = 160
_DICT_ITEM: Final = 96
_COPIED: Final = 16
_NOTHING: Final = object()
_OLD_MODULES: Final = {"__builtin__": "builtins", "torch.tensor": "torch._tensor"}


FindName = Callable[[str, str], Any]
"""What stands for a (module, name): a value, a `Function`, or an `InertClass`; `KeyError` if it is not allowed."""


def read_pickle(
    data: bytes | mmap.mmap,
    find: FindName,
    persistent_load: Callable[[Any], Any],
    name: str,
    budget: Budget,
    start: int = 0,
) -> tuple[Any, int]:
    """Read one pickle.

    Args:
        data: It begins at `start`.
        find: What a name stands for.
        persistent_load: What a persistent id stands for; raises `FormatError` for one that is wrong.
        name: What errors call the pickle.
        budget: What is left for the file that the pickle is in.
        start: In bytes.

    Returns:
        The object, and the byte after the pickle's end.

    Raises:
        FormatError: It is damaged, uses opcodes or names that are not allowed, or calls a function with arguments that
            it does not take; or what it builds would be much larger than the file.
    """
    machine = _Machine(data, find, persistent_load, budget, start)
    fact = "the pickle is damaged"
    try:
        return machine.run(), machine.at
    except FormatError as error:
        fact = str(error)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, struct.error):
        pass
    raise PickleError(f"'{name}', byte {machine.at}: {fact}")


class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(
        self,
        data: bytes | mmap.mmap,
        find: FindName,
        persistent_load: Callable[[Any], Any],
        budget: Budget,
        start: int,
    ) -> None:
        self.at = start
        self._data = data
        self._find = find
        self._persistent_load = persistent_load
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: list[Any] = []
        self._tables: dict[int, KeyTable] = {}  # of dicts that have other keys than text, by their ids
        self._spend = budget.spend

    def run(self) -> Any:
        data, steps = self._data, _STEPS
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                break
            step = steps.get(opcode)
            if step is None:
                raise FormatError(f"opcode {bytes([opcode])!r} is not one that torch.save writes")
            step(self)
        if self._marks or len(self._stack) != 1:
            raise FormatError("the pickle does not end with one object")
        return self._stack.pop()

    def _take(self, nbytes: int) -> bytes:
        data = self._data[self.at : self.at + nbytes]
        if len(data) < nbytes:
            raise FormatError("the pickle ends too early")
        self.at += nbytes
        return data

    def _unpack(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._data, self.at)
        self.at += form.size
        return value

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _line(self) -> str:
        stop = self._data.find(b"\n", self.at, self.at + _MAX_NAME)
        if stop < 0:
            raise FormatError("a name that does not end")
        line = self._data[self.at : stop].decode()
        self.at = stop + 1
        return line

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    # What the opcodes do, in the order of pickle's documentation.

    def _proto(self) -> None:
        protocol = self._byte()
        if protocol > _NEWEST_PROTOCOL:
            raise FormatError(
                f"pickle protocol {protocol} is newer than torch's restricted reader knows; "
                "save the file again with torch.save's own protocol"
            )

    def _persistent(self) -> None:
        self._spend(_CONTAINER)
        self._stack[-1] = self._persistent_load(self._stack[-1])

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []
        if len(self._marks) > _MAX_MARKS:
            raise FormatError(f"more than {_MAX_MARKS} containers are open at once")

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int(self) -> None:
        self._stack.append(self._unpack(_INT))

    def _int1(self) -> None:
        self._stack.append(self._byte())

    def _int2(self) -> None:
        self._stack.append(self._unpack(_SHORT))

    def _long(self) -> None:
        self._stack.append(pickle.decode_long(self._take(self._byte())))

    def _float(self) -> None:
        self._stack.append(self._unpack(_FLOAT))

    def _text(self) -> None:
        self._stack.append(str(self._take(self._unpack(_LENGTH)), "utf-8", "surrogatepass"))

    def _short_string(self) -> None:
        self._stack.append(self._take(self._byte()).decode())

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _empty_list(self) -> None:
        self._new_container([])

    def _empty_dict(self) -> None:
        self._new_container({})

    def _empty_set(self) -> None:
        self._new_container(set())

    def _new_container(self, container: Any) -> None:
        self._spend(_CONTAINER)
        self._stack.append(container)

    def _tuple(self) -> None:
        self._spend(_CONTAINER)
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _tuple1(self) -> None:
        self._spend(_CONTAINER)
        self._stack[-1] = (self._stack[-1],)

    def _tuple2(self) -> None:
        self._spend(_CONTAINER)
        stack = self._stack
        last = stack.pop()
        stack[-1] = (stack[-1], last)

    def _tuple3(self) -> None:
        self._spend(_CONTAINER)
        stack = self._stack
        last, middle = stack.pop(), stack.pop()
        stack[-1] = (stack[-1], middle, last)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is Inert:
            target = target.given
        elif type(target) is not list:
            self._refuse("append to", target)
        target.extend(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_pairs([key, value])

    def _set_items(self) -> None:
        self._set_pairs(self._pop_mark())

    def _set_pairs(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is Inert:
            target.given.extend(items)
            return
        if type(target) not in _DICTS:
            self._refuse("set items of", target)
        self._spend(_DICT_ITEM * (len(items) // 2))
        table = self._tables.get(id(target))
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                check_key(key, self._spend)
                if table is None:
                    table = self._tables[id(target)] = KeyTable(target)
            if table is not None:
                table.add(key)
            target[key] = value

    def _get(self) -> None:
        self._remember(self._byte())

    def _long_get(self) -> None:
        self._remember(self._unpack(_LENGTH))

    def _put(self) -> None:
        self._memoize(self._byte())

    def _long_put(self) -> None:
        self._memoize(self._unpack(_LENGTH))

    def _remember(self, number: int) -> None:
        value = self._memo[number]
        if value is _NOTHING:
            raise FormatError(f"place {number} of the memo is empty")
        self._stack.append(value)

    def _memoize(self, number: int) -> None:
        memo = self._memo
        if number < len(memo):
            memo[number] = self._stack[-1]
            return
        # Writers number the places one after another. A list, as the keys of a dict could be made to collide.
        if number > self.at:
            raise FormatError(f"place {number} of the memo, at byte {self.at}")
        if number > len(memo):
            memo.extend([_NOTHING] * (number - len(memo)))
        memo.append(self._stack[-1])

    def _global(self) -> None:
        module, name = self._line(), self._line()
        try:
            found = self._find(_OLD_MODULES.get(module, module), name)
        except KeyError:
            raise FormatError(
                f"{f'{module}.{name}'!r:.200} is not a name that may stand in a file of tensors: the file holds other "
                "Python objects, or wants to run code; nothing was looked up or run"
            ) from None
        if type(found) is InertClass:
            self._spend(_CONTAINER)
        self._stack.append(found)

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack[-1]
        if type(function) in _NOT_MADE:
            self._spend(CALL)
            self._stack[-1] = Inert(function.name, [arguments])
            return
        if type(function) is not Function or type(arguments) is not tuple:
            self._refuse("call", function)
        self._spend(function.nbytes)
        self._copy([arguments])
        self._copy(arguments)
        self._copy(part for argument in arguments if type(argument) is tuple for part in argument)
        self._stack[-1] = function.call(self._spend, *arguments) if function.counts else function.call(*arguments)

    def _new(self) -> None:
        kind = self._stack[-2]
        if type(kind) not in _NOT_MADE:
            self._refuse("make an object of", kind)
        self._reduce()

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is Inert:
            target.given.append(state)
        elif type(target) is OrderedDict and type(state) is dict:
            for key in state:
                # An attribute of the name of a method would hide it.
                if type(key) is not str or hasattr(OrderedDict, key):
                    raise FormatError(f"an OrderedDict has the attribute {brief(key)}")
            self._copy([state])
            target.__dict__.update(state)
        else:
            self._refuse("set the state of", target)

    def _copy(self, values: Iterable[Any]) -> None:
        """Count what a call may copy, before it does."""
        self._spend(_COPIED * sum(len(value) for value in values if type(value) in _SIZED))

    def _refuse(self, what: str, value: Any) -> NoReturn:
        raise FormatError(f"the pickle wants to {what} {brief(value)}, as no file of tensors does")


def brief(value: Any) -> str:
    """A value in a few words, whatever it is: a container could be larger in words than it is in memory."""
    if isinstance(value, Function | InertClass | Inert):
        return f"{value.name!r:.200}"
    return f"{value!r:.100}" if type(value) in PLAIN_KEYS else f"a {type(value).__name__}"


_STOP: Final = pickle.STOP[0]
_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    opcode[0]: step
    for opcode, step in (
        (pickle.PROTO, _Machine._proto),
        (pickle.BINPERSID, _Machine._persistent),
        (pickle.MARK, _Machine._mark),
        (pickle.NONE, _Machine._none),
        (pickle.NEWTRUE, _Machine._true),
        (pickle.NEWFALSE, _Machine._false),
        (pickle.BININT, _Machine._int),
        (pickle.BININT1, _Machine._int1),
        (pickle.BININT2, _Machine._int2),
        (pickle.LONG1, _Machine._long),
        (pickle.BINFLOAT, _Machine._float),
        (pickle.BINUNICODE, _Machine._text),
        (pickle.SHORT_BINSTRING, _Machine._short_string),
        (pickle.EMPTY_TUPLE, _Machine._empty_tuple),
        (pickle.EMPTY_LIST, _Machine._empty_list),
        (pickle.EMPTY_DICT, _Machine._empty_dict),
        (pickle.EMPTY_SET, _Machine._empty_set),
        (pickle.TUPLE, _Machine._tuple),
        (pickle.TUPLE1, _Machine._tuple1),
        (pickle.TUPLE2, _Machine._tuple2),
        (pickle.TUPLE3, _Machine._tuple3),
        (pickle.APPEND, lambda machine: machine._extend([machine._stack.pop()])),
        (pickle.APPENDS, lambda machine: machine._extend(machine._pop_mark())),
        (pickle.SETITEM, _Machine._set_item),
        (pickle.SETITEMS, _Machine._set_items),
        (pickle.BINGET, _Machine._get),
        (pickle.LONG_BINGET, _Machine._long_get),
        (pickle.BINPUT, _Machine._put),
        (pickle.LONG_BINPUT, _Machine._long_put),
        (pickle.GLOBAL, _Machine._global),
        (pickle.REDUCE, _Machine._reduce),
        (pickle.NEWOBJ, _Machine._new),
        (pickle.BUILD, _Machine._build),
    )
}
