"""What all campaigns share: their arguments, a seeded choice of cases, and the count of what was tried and wrong."""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")

# Read when huggingface_hub is imported; nothing here asks for anything that is not on this machine.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")


class Campaign:
    """Counts cases, prints each wrong one as it is found, and at the end the sentence that runners read.

    Args:
        argv: `--long` for all cases instead of a few; `--seed N` for other ones; `--only TEXT` for scenarios with that
            in their names.
        about: One line for `--help`.

    Attributes:
        folder: For what the campaign needs on the disk; removed at the end.
    """

    def __init__(self, argv: Sequence[str], about: str) -> None:
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("--long", action="store_true", help="try all cases, not only a few")
        parser.add_argument("--seed", type=int, default=0, help="chooses the cases; 0 unless told")
        parser.add_argument("--only", default="", help="only scenarios whose names hold this")
        parser.add_argument("--peers", action="store_true", help="try plain libraries instead, for comparison")
        told = parser.parse_args(argv)
        self.long: bool = told.long
        self.seed: int = told.seed
        self.only: str = told.only
        self.peers: bool = told.peers
        self.random = random.Random(told.seed)
        self.tried = 0
        self.wrong = 0
        self.skipped: list[str] = []
        print(f"seed {self.seed}", flush=True)

    def __enter__(self) -> Campaign:
        import torch

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        self.folder = Path(tempfile.mkdtemp(prefix="hf-stream-campaign-"))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def few(self, cases: Sequence[Case], count: int) -> list[Case]:
        """All cases in a long run; else some of them, drawn from the seed, in their order."""
        if self.long or len(cases) <= count:
            return list(cases)
        return [cases[n] for n in sorted(self.random.sample(range(len(cases)), count))]

    def wanted(self, name: str) -> bool:
        return self.only in name

    def case(self, label: str, wrong: Sequence[str]) -> None:
        """Count a case, which is wrong if anything is said about it."""
        self.tried += 1
        if wrong:
            self.wrong += 1
            print(f"WRONG {label}: {'; '.join(wrong)}"[:1000], flush=True)

    def skip(self, what: str, why: object) -> None:
        """Say that something cannot be tried on this machine."""
        self.skipped.append(what)
        print(f"skipped: {what}: {why}", flush=True)

    def end(self) -> int:
        """Print the result; the exit status."""
        print(f"tried {self.tried}, wrong {self.wrong}", flush=True)
        return 1 if self.wrong else 0
