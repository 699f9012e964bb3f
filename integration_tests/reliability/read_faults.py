"""Campaign: the source of a conversion cannot be read, is cut off, or becomes another one while it is read."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trees
from calls import Watch, fail_at, noted
from campaign import Campaign
from forks import forked
from judging import fresh
from safetensors.torch import save_file

import hf_stream

FEW = 5  # cases of each kind in a short run
COUNT, ROWS = 6, 256
NBYTES = ROWS * ROWS * 4  # of a tensor
READING = ("open", "read", "pread", "preadv", "readv", "copy_file_range", "sendfile")


def _transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.T for name, tensor in tensors.items()}


# Bytes go from file to file in one piece; through mapped windows; and through memory.
WAYS: dict[str, dict[str, Any]] = {
    "copied": {},
    "transposed": {"layout": _transposed},
    "cast": {"dtype": torch.bfloat16},
}


def main(argv: Sequence[str]) -> int:
    with Campaign(argv, __doc__ or "") as campaign:
        template = campaign.folder / "template"
        source(template / "source", 1)
        source(template / "other", 2)
        source(template / "old", 3)
        for way, options in WAYS.items():
            for where in ("new", "old"):
                label = f"{way}, into {'an existing' if where == 'old' else 'a new'} directory"
                if campaign.wanted(label):
                    top = fresh(template, campaign.folder / "top")
                    case = Case(label, template, top, top / where, options)
                    wanted = case.undisturbed()
                    fail_reads(campaign, case, wanted)
                    change_source(campaign, case, wanted)
        return campaign.end()


@dataclass
class Case:
    """A conversion of `source` to a destination, which is new or not."""

    label: str
    template: Path
    top: Path
    out: Path
    options: dict[str, Any]

    def convert(self, **options: Any) -> None:
        hf_stream.convert(
            self.top / "source", self.out, **{"progress": False, "resume": False, **self.options, **options}
        )

    def undisturbed(self) -> trees.Tree | None:
        """What it gives."""
        self.convert()
        return trees.files(self.out)


def source(directory: Path, value: int) -> None:
    """Two files of three tensors; those of different values have the same sizes."""
    directory.mkdir(parents=True)
    for file in range(2):
        tensors = {f"t{n}": torch.full((ROWS, ROWS), float(value * 10 + n)) for n in range(3 * file, 3 * file + 3)}
        save_file(tensors, directory / f"model-{file + 1:05}-of-00002.safetensors", {"format": "pt"})


def fail_reads(campaign: Campaign, case: Case, wanted: trees.Tree) -> None:
    """Let each read fail once."""
    fresh(case.template, case.top)
    watched = case.top / "source"
    calls: list[str] = forked(lambda: noted(case.convert, watched, READING)).value
    for number in campaign.few(range(len(calls)), FEW):

        def convert(number: int = number) -> None:
            with Watch(watched, READING, fail_at(number, errno.EIO)):
                case.convert()

        wrong = attempt(case, convert, wanted, os.strerror(errno.EIO))
        campaign.case(f"{case.label}: call {number} ({calls[number]}) fails", wrong)


def change_source(campaign: Campaign, case: Case, wanted: trees.Tree) -> None:
    """Change the source when a part of it has been read."""
    moments = [(change, call) for change in CHANGES for call in range(1, COUNT)]
    for change, call in campaign.few(moments, FEW):

        class Then:
            left = call
            act = staticmethod(CHANGES[change])

            def update(self, n: int) -> None:
                self.left -= 1
                if not self.left:
                    self.act(case.top)

        wrong = attempt(case, lambda: case.convert(progress=Then(), buffer_size=NBYTES), wanted)
        campaign.case(f"{case.label}: {change} after {call} steps", wrong)


def attempt(case: Case, convert: Callable[[], object], wanted: trees.Tree, said: str = "") -> list[str]:
    """Convert: that fails in words and leaves the destination as it was, or gives what was there when it began."""
    fresh(case.template, case.top)

    def run() -> list[str]:
        before = trees.files(case.out)
        try:
            convert()
        except (hf_stream.HfStreamError, OSError) as error:
            wrong = [] if said in str(error) else [f"the error does not say '{said}': {error}"]
            left = trees.files(case.out)
            return wrong + ([] if left == before else [f"the destination changed: {trees.difference(left, before)}"])
        left = trees.files(case.out)
        return [] if left == wanted else ["it reports success, and what it wrote is part old and part new"]

    ended = forked(run)
    return ended.value if ended.value is not None else [str(ended)]


def _cut_off(top: Path) -> None:
    for file in (top / "source").iterdir():
        os.truncate(file, NBYTES)


def _replaced(top: Path) -> None:
    for file in (top / "other").iterdir():
        os.replace(file, top / "source" / file.name)


def _overwritten(top: Path) -> None:
    for file in (top / "other").iterdir():
        (top / "source" / file.name).write_bytes(file.read_bytes())


def _last_overwritten(top: Path) -> None:
    name = sorted(os.listdir(top / "source"))[-1]
    with (top / "source" / name).open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut off": _cut_off,
    "replaced": _replaced,
    "overwritten": _overwritten,
    "overwritten at its end": _last_overwritten,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
