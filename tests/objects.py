"""Files of torch.save with Python objects in them, of classes that are there when they are saved and not later."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Phase(enum.Enum):
    TRAIN = "train"
    TEST = "test"


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    size: int = 3


class Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


Pair = collections.namedtuple("Pair", "x y")


class AttributeDict(dict):
    pass


class Items(list):
    pass


class Node:
    """A node of a config as omegaconf makes it: children know their parents, and types are values."""

    def __init__(self, content: dict[str, Any], parent: Node | None = None) -> None:
        self._parent = parent
        self._metadata = {"ref_type": Any, "object_type": dict, "flags": {"readonly": False}}
        self._content = {key: Node(value, self) if isinstance(value, dict) else value for key, value in content.items()}


class Reduced:
    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (), {"state": 1}, iter([1, 2]), iter([("k", torch.ones(1))])

    def extend(self, *items: Any) -> None:
        """For the pickle; of no other use."""

    append = __setitem__ = extend


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 3)


def function(x: Any) -> Any:
    return x


_GONE = "project_that_is_not_installed"
_PROJECT = types.ModuleType(_GONE)
for _member in (Phase, Flags, Settings, Frozen, Slots, Pair, AttributeDict, Items, Node, Reduced, Net, function):
    _member.__module__ = _GONE
    setattr(_PROJECT, _member.__name__, _member)


@contextmanager
def installed() -> Iterator[None]:
    """Run a block in which the objects here can be pickled and unpickled."""
    sys.modules[_GONE] = _PROJECT
    try:
        yield
    finally:
        del sys.modules[_GONE]


OBJECTS: dict[str, Callable[[], Any]] = {
    "Namespace": lambda: argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=[1])),
    "Namespace of tensors": lambda: argparse.Namespace(weight=torch.ones(2)),
    "numpy float": lambda: np.float64(0.5),
    "numpy bool": lambda: np.bool_(True),
    "numpy array": lambda: np.arange(6.0).reshape(2, 3),
    "numpy array of objects": lambda: np.array([{"a": 1}, None], dtype=object),
    "numpy dtype": lambda: np.dtype("<f4"),
    "numpy generator": lambda: np.random.default_rng(0),
    "path": lambda: pathlib.PurePosixPath("a") / "b",
    "here": lambda: pathlib.Path("/tmp/x"),
    "defaultdict": lambda: collections.defaultdict(list, {"a": [1], 2: [torch.ones(1)]}),
    "deque": lambda: collections.deque([1, 2], maxlen=3),
    "datetime": lambda: datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    "timedelta": lambda: datetime.timedelta(seconds=3),
    "enum": lambda: Phase.TRAIN,
    "flag": lambda: Flags.A | Flags.B,
    "dataclass": lambda: Settings(),
    "frozen dataclass": lambda: Frozen(),
    "slots": lambda: Slots(),
    "namedtuple": lambda: Pair(1, torch.ones(1)),
    "subclass of dict": lambda: AttributeDict(a=1, b=torch.ones(1)),
    "subclass of list": lambda: Items([1, [2]]),
    "config": lambda: Node({"model": {"dim": 3}, "lr": [0.1]}),
    "own reduce": lambda: Reduced(),
    "module": lambda: Net(),
    "class": lambda: Settings,
    "function": lambda: function,
    "partial": lambda: functools.partial(function, 1),
    "frozenset": lambda: frozenset([1, "a"]),
    "range": lambda: range(3),
    "decimal": lambda: decimal.Decimal("0.1"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "uuid": lambda: uuid.UUID(int=7),
    "pattern": lambda: re.compile("a+"),
    "exception": lambda: ValueError("wrong"),
    "random": lambda: random.Random(3),
    "type": lambda: dict,
    "iterator": lambda: iter([1, 2]),
    "set of paths": lambda: {pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b"), 3},
    "keys": lambda: {Phase.TRAIN: torch.ones(2), (Phase.TEST, 1): 3},
    "key of tensors alone": lambda: collections.OrderedDict({Phase.TEST: torch.ones(1)}),
}


def lightning() -> dict[str, Any]:
    """A checkpoint as Lightning writes it."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net.linear(torch.ones(2)).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "global_step": 1200,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": net.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss'}": {
                "best_model_score": torch.tensor(0.25),
                "dirpath": pathlib.PosixPath("/runs/1"),
                "kth_value": np.float32(0.5),
                "best_k_models": collections.defaultdict(float, {"a.ckpt": 0.5}),
            }
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"base_lrs": [0.1], "_last_lr": [np.float64(0.1)], "anneal": function}],
        "hparams_name": "kwargs",
        "hyper_parameters": AttributeDict(
            model=Net(), phase=Phase.TRAIN, config=Node({"a": {"b": 1}}), args=argparse.Namespace(seed=1)
        ),
        "datamodule_hparams_type": AttributeDict,
        "started": datetime.datetime(2024, 1, 2),
    }


def fairseq() -> dict[str, Any]:
    """A checkpoint as fairseq writes it."""
    model = {"encoder.embed.weight": torch.arange(6.0).reshape(3, 2), "decoder.bias": torch.ones(2, dtype=torch.half)}
    return {
        "args": argparse.Namespace(arch="transformer", lr=[0.1], save_dir=pathlib.PosixPath("checkpoints")),
        "cfg": Node({"task": {"data": "x"}, "settings": Settings(), "phase": Phase.TEST}),
        "model": model,
        "criterion": None,
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "num_updates": 7, "best": np.float64(3.5)}],
        "task_state": collections.defaultdict(dict),
        "extra_state": {
            "metrics": collections.OrderedDict(default=[(0, "loss", Settings(), {"sum": torch.tensor(2.0)})]),
            "previous_training_time": np.float64(12.0),
        },
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"lr": 0.1}]},
    }
