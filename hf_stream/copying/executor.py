"""Runs copies on a few threads, within a budget of temporary memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from hf_stream.copying.cuda import devices_of, synchronize
from hf_stream.copying.moves import Runs
from hf_stream.copying.plan import Copy, Plan
from hf_stream.copying.progress import Progress, progress_bar
from hf_stream.copying.schedule import Move, schedule
from hf_stream.copying.scratch import Scratch
from hf_stream.errors import CopyError

DEFAULT_BUFFER_SIZE = 64 << 20

# Starting threads costs more than moving this much.
_WORTH_A_THREAD = 4 << 20


def execute(
    copies: Iterable[Copy],
    *,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    threads: int | None = None,
    progress: bool | Progress | None = False,
    desc: str = "",
) -> None:
    """Carry out copies, in an order of its own. No byte moves if the plan cannot be right.

    Args:
        copies: What to copy; a Plan or anything that gives copies.
        buffer_size: Bound in bytes on the temporary memory of all threads together.
        threads: Threads that move bytes, the calling one among them; by default one for each core, and at most four.
        progress: Something with `update(nbytes)`, as a tqdm bar has; or True for a bar on stderr, None for a bar if
            stderr is a terminal. `update` is called with the bytes written, by one thread at a time.
        desc: What the bar calls the work.

    Raises:
        ValueError: There is to be no thread.
        CopyError: a region reaches beyond its storage or is read and written at once (before any byte moves), or
            moving bytes failed: what had not started then never does, and the message says which tensor and files.
    """
    plan = Plan.of(copies)
    plan.check()
    total = plan.nbytes_written
    if threads is None:
        threads = min(4, os.cpu_count() or 1)
    elif threads < 1:
        raise ValueError(f"threads={threads}: bytes are moved by one thread at least")
    threads = max(1, min(threads, total // _WORTH_A_THREAD))
    share = max(1, buffer_size // threads)
    moves = schedule(plan, share)
    devices = devices_of(plan)
    with progress_bar(progress, total, desc) as bar:
        synchronize(devices)
        _Crew(moves, bar, share, pinned=bool(devices)).work(threads)
        synchronize(devices)


class _Crew:
    """Threads that take moves from one list until it is empty or one of them fails."""

    def __init__(self, moves: Sequence[Move], bar: Progress | None, share: int, pinned: bool) -> None:
        self._share = share
        self._pinned = pinned
        self._moves = iter(moves)
        self._bar = bar
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def work(self, threads: int) -> None:
        """Work in `threads` threads, the calling one included; returns when all have stopped."""
        helpers: list[threading.Thread] = []
        try:
            for _ in range(threads - 1):
                helper = threading.Thread(target=self._run, daemon=True)
                helper.start()
                helpers.append(helper)
            self._run()
        finally:
            # After a KeyboardInterrupt, or where no thread can be started, too: memory must not be written to once
            # the caller has it back.
            self._stop()
            _join(helpers)
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        with self._lock:
            self._moves = iter(())

    def _run(self) -> None:
        scratch = Scratch(self._share, self._pinned)
        while True:
            with self._lock:
                move = next(self._moves, None)
            if move is None:
                return
            try:
                move.perform(scratch)
            except Exception as error:  # noqa: BLE001 - reported by the calling thread
                self._fail(_explain(move, error))
                return
            except BaseException as error:  # noqa: BLE001 - likewise: nothing may go on as if it were done
                self._fail(error)
                return
            if self._bar is not None:
                try:
                    with self._lock:
                        self._bar.update(move.nbytes)
                except BaseException as error:  # noqa: BLE001 - likewise
                    self._fail(error)
                    return

    def _fail(self, error: BaseException) -> None:
        """Keep the first error and let nothing more start."""
        with self._lock:
            self._moves = iter(())
            if self._error is None:
                self._error = error


def _join(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads that are about to stop, also if that is interrupted; the interrupt comes afterwards."""
    interrupt: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _explain(move: Move, error: Exception) -> CopyError:
    """The error with what it was about: tensor, both sides and where in them."""
    copy = move.copy
    # Neighbours that go in one system call fail together.
    names = list(dict.fromkeys(run.copy.name for run in move.runs)) if isinstance(move, Runs) else [copy.name]
    subject = f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' or one of the next {len(names) - 1} tensors"
    explained = CopyError(
        f"{subject}: copying {copy.src.nbytes} bytes from {copy.src.storage.name} (at byte {copy.src.offset}) "
        f"to {copy.dst.storage.name} (at byte {copy.dst.offset}) failed: {error}"
    )
    if isinstance(error, OSError):
        explained.errno = error.errno
    explained.__cause__ = error
    return explained
