"""What takes the place of Trainer's methods: each gets the settings, the trainer and the plain method.

Where Trainer decides (what belongs to a checkpoint, which is the best one, what is uploaded) it goes on deciding; only
where things are written, and by whom, is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_stream.integrations.trainer import place, states, weights
from hf_stream.integrations.trainer.settings import Settings
from hf_stream.integrations.transformers.log_names import logged_as

Plain = Callable[..., Any]

_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def save_checkpoint(settings: Settings, trainer: Any, plain: Plain, model: Any, trial: Any = None) -> None:
    """In place of `Trainer._save_checkpoint`: the same, in a directory that is given its name when it is complete."""
    args, state = trainer.args, trainer.state
    run_dir = trainer._get_output_dir(trial=trial)
    target = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
    wait = trainer.accelerator.wait_for_everyone
    if args.should_save:
        place.clear_leftovers(run_dir)
    saving = (
        place.growing(Path(target), settings.durable)
        if args.should_save
        else nullcontext(place.growing_path(Path(target)))
    )
    pushed: list[str] = []
    with saving as path:
        wait()
        with (
            _instead(trainer, _get_output_dir=lambda trial: str(path.parent), _push_from_checkpoint=pushed.append),
            logged_as(path, target),
        ):
            plain(model, trial)
        if state.best_global_step and (best == target or os.path.exists(best)):
            state.best_model_checkpoint = best
            if args.should_save:
                state.save_to_json(str(path / TRAINER_STATE_NAME))
        wait()
    wait()
    if pushed:
        trainer._push_from_checkpoint(target)
    if args.should_save:
        place.remove_oldest(run_dir, args.save_total_limit, state.best_model_checkpoint)


def save(
    settings: Settings,
    trainer: Any,
    plain: Plain,
    output_dir: str | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """In place of `Trainer._save`: the weights are streamed, in the layout."""
    model = _unwrapped(trainer, trainer.model)
    directory = Path(trainer.args.output_dir if output_dir is None else output_dir)
    if directory == Path(trainer.args.output_dir):
        trainer._finish_current_push()  # which would upload half of what is written here
    if weights.who_saves(model) is not None:
        plain(output_dir, state_dict)
        return
    if isinstance(model, PreTrainedModel):
        if state_dict is None and model is not trainer.model:
            state_dict = model.state_dict()  # Trainer would save the names of what is wrapped around it
        with weights.streaming(model, settings):
            plain(output_dir, state_dict)
    elif trainer.args.should_save:

        def save_others(files: Path) -> None:
            plain(str(files), {})
            (files / SAFE_WEIGHTS_NAME).unlink()

        weights.save_module(model, directory, settings, save_others)
    if trainer.args.should_save:
        weights.write_record(directory, settings)


def load_from_checkpoint(
    settings: Settings, trainer: Any, plain: Plain, resume_from_checkpoint: str, model: Any = None
) -> None:
    """In place of `Trainer._load_from_checkpoint`: strictly, in place, back through the layout."""
    model = _unwrapped(trainer, trainer.model if model is None else model)
    if weights.who_saves(model) is not None:
        plain(resume_from_checkpoint, model)
    else:
        weights.load_weights(model, Path(resume_from_checkpoint), settings)


def load_best_model(settings: Settings, trainer: Any, plain: Plain) -> None:
    """In place of `Trainer._load_best_model`."""
    directory = Path(trainer.state.best_model_checkpoint)
    model = _unwrapped(trainer, trainer.model)
    here = any((directory / name).exists() for name in _WEIGHTS)
    if weights.who_saves(model) is not None or not here:
        plain()
    else:
        weights.load_weights(model, directory, settings)


def finalize_training(settings: Settings, trainer: Any, plain: Plain, trial: Any, *args: Any, **kwargs: Any) -> Any:
    """Before `Trainer._finalize_training` can, remove what it would: there, a kill would leave half of a checkpoint."""
    best = trainer.state.best_model_checkpoint
    if not trainer.args.should_save or best is None or trainer.args.save_total_limit != 1:
        return plain(trial, *args, **kwargs)
    load = trainer._load_best_model

    def remove_others() -> None:
        for checkpoint in sort_checkpoints(trainer._get_output_dir(trial)):
            if not os.path.samefile(checkpoint, best):
                place.remove(Path(checkpoint))

    def load_first() -> None:
        load()
        remove_others()

    if trainer.args.load_best_model_at_end:
        with _instead(trainer, _load_best_model=load_first):
            return plain(trial, *args, **kwargs)
    remove_others()
    return plain(trial, *args, **kwargs)


METHODS: Mapping[str, Callable[..., Any]] = {
    "_save_checkpoint": save_checkpoint,
    "_save": save,
    "_save_optimizer_and_scheduler": states.save_optimizer_and_scheduler,
    "_save_scaler": states.save_scaler,
    "_save_rng_state": states.save_rng_state,
    "_load_from_checkpoint": load_from_checkpoint,
    "_load_best_model": load_best_model,
    "_load_optimizer_and_scheduler": states.load_optimizer_and_scheduler,
    "_load_scaler": states.load_scaler,
    "_load_rng_state": states.load_rng_state,
    "_finalize_training": finalize_training,
}


def _unwrapped(trainer: Any, model: Any) -> Any:
    return trainer.accelerator.unwrap_model(model, keep_torch_compile=False)


@contextmanager
def _instead(trainer: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Run a block in which one trainer has these methods in place of its own."""
    before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(trainer)[name]
        vars(trainer).update(before)
