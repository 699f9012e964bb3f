"""Trainings that tests run in processes of their own, to kill them: `python trainer_children.py NAME ARGUMENTS`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from children import die_after

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from trainings import llama, moe, trainer

from hf_stream.integrations.trainer import StreamingCheckpointCallback
from hf_stream.layouts import stacked_experts


class Killed(transformers.TrainerCallback):
    """Kills its process when the checkpoint of a step has been saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(output_dir: str, killed_after: str, resume: str) -> None:
    """Train a mixture of experts for four steps, from the last checkpoint or from the beginning."""
    run = trainer(
        moe(seed=5 if resume == "resume" else 0),
        Path(output_dir),
        StreamingCheckpointCallback(stacked_experts()),
        Killed(int(killed_after)),
    )
    run.train(resume_from_checkpoint=resume == "resume")


def save_all_the_time(output_dir: str, resume: str) -> None:
    """Train and save after every step until somebody ends this; say when the first checkpoint is there."""

    class Told(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sys.stdout.write("saved\n")
            sys.stdout.flush()

    arguments = {"max_steps": 10_000, "save_steps": 1, "save_total_limit": 3, "lr_scheduler_type": "constant"}
    run = trainer(llama(), Path(output_dir), StreamingCheckpointCallback(max_shard_size="8KB"), Told(), **arguments)
    run.train(resume_from_checkpoint=resume == "resume")


def save_until_killed(top: str) -> None:
    """Save one checkpoint over copies of a directory, each time in a process that is killed one change later.

    There, two older checkpoints stand, one of which is to go, and one of the same step; say how often it was killed.
    """
    run = trainer(llama(), Path(top, "template"), StreamingCheckpointCallback(), save_total_limit=2)
    run.create_optimizer_and_scheduler(4)
    for step in (1, 2, 3):
        run.state.global_step = step
        run.args.save_total_limit = None
        run._save_checkpoint(run.model, trial=None)
        time.sleep(0.01)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(3)
    run.args.save_total_limit = 2
    for limit in range(1000):
        run.args.output_dir = str(Path(top, str(limit)))
        shutil.copytree(Path(top, "template"), run.args.output_dir)
        child = os.fork()
        if not child:
            die_after(limit, Path(top))
            run._save_checkpoint(run.model, trial=None)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            sys.stdout.write(f"{limit}\n")
            return


def push(output_dir: str, repo_id: str) -> None:
    """Train and push every checkpoint."""
    arguments = {"push_to_hub": True, "hub_model_id": repo_id, "hub_strategy": "all_checkpoints"}
    callback = StreamingCheckpointCallback(stacked_experts(), max_shard_size="8KB")
    run = trainer(moe(), Path(output_dir), callback, hub_always_push=True, **arguments)
    run.train()
    run.push_to_hub()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
