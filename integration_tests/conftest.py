"""What integration tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hub_server import HubServer
from repeatable import (
    pytest_collectstart,
    pytest_fixture_setup,
    pytest_runtest_call,
    pytest_xdist_auto_num_workers,
)

__all__ = [
    "pytest_collectstart",
    "pytest_fixture_setup",
    "pytest_runtest_call",
    "pytest_xdist_auto_num_workers",
]

# Shells start what runs in the background with interrupts ignored, and so would every process that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A Hub of its own for a test, to which processes with `hub.environment(home)` push, and from which they load.

    It keeps what is pushed: `hub.files(repo_id, revision)` gives a repository's files and their bytes,
    `hub.commits(repo_id)` every commit, `hub.requests` all that was asked of it. Nothing leaves this machine.
    """
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server
