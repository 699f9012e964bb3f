"""The same test run for everybody: chance is drawn from seeds that tests' names give, whatever ran before.

`conftest.py` imports the hooks. Hypothesis draws what the name and the text of a property test say; `scripts/fuzz` lets
it draw something else.
"""

from __future__ import annotations

import os
import random
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants

# How fast a machine is, what else runs on it and what it ran before is no matter of right and wrong.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# Hypothesis also draws numbers and texts that stand in modules of the project, in those that happen to be imported.
HypothesisProvider._local_constants = Constants()


class TorchRandom:
    """Torch's generator, for hypothesis to seed before each example: one that fails does so again, by itself."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


register_random(TorchRandom)


MOST_PROCESSES = 4

for _name in [name for name in os.environ if name.startswith("HF_STREAM_")]:
    del os.environ[_name]


def seed(name: str) -> None:
    """Seed everything that tests draw from."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means. Each process imports torch and transformers: more than a few are slower than few."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What modules draw while they are imported."""
    seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    """What fixtures draw: of those that several tests share, it does not matter which test comes first."""
    seed(f"{request.node.nodeid}::{fixturedef.argname}[{getattr(request, 'param_index', '')}]")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """What tests draw themselves."""
    seed(item.nodeid)
