"""What stands in a pickle for functions, classes and objects: their names, and nothing that could run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

# Bytes of memory, for what a call gives.
CALL: Final = 256


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """What a pickle may call: its name, and what is done instead.

    `call` raises `FormatError` for arguments it does not take. `nbytes` is the memory that goes with its result. If it
    `counts` more than that, its first argument is what it counts with.
    """

    name: str
    call: Callable[..., Any]
    nbytes: int = CALL
    counts: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class InertClass:
    """A class or a function that was not looked up; calling it gives an `Inert`."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(eq=False, slots=True, repr=False)
class Inert:
    """An object that was not made.

    It equals itself alone, and its hash is that of its place in memory: nobody can choose it.

    Attributes:
        name: Of the class or the function that was to make it.
        given: What that was to make it of: arguments, items, states, in the order of the pickle.
    """

    name: str
    given: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.name}>"
