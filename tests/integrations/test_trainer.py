from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from trainings import SIZES, contents, differing, llama, moe, names, quickly, texts, trainer, weights_of
from transformers import Trainer
from transformers.trainer_utils import HPSearchBackend, get_last_checkpoint

import hf_stream
from hf_stream import CheckpointError, Layout, LayoutError
from hf_stream.checkpoint.nested import load_nested
from hf_stream.integrations.trainer import StreamingCheckpointCallback
from hf_stream.layouts import Apply, Drop, packed_gate_up, packed_qkv, stacked_experts

WEIGHTS = "model.safetensors"
EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "of_trainer": {"eval_dataset": texts(4)}}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with quickly():
        yield


@pytest.fixture(scope="module")
def of_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four steps of a mixture of experts leave, with our callback."""
    directory = tmp_path_factory.mktemp("moe")
    trainer(moe(), directory, StreamingCheckpointCallback()).train()
    return directory


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four steps of a dense model leave, with plain Trainer."""
    directory = tmp_path_factory.mktemp("llama")
    trainer(llama(), directory).train()
    return directory


@pytest.mark.parametrize("layout", [None, stacked_experts()], ids=["as-saved", "stacked"])
def test_two_steps_and_two_resumed_leave_the_files_of_four_steps(
    of_moe: Path, tmp_path: Path, layout: Layout | None
) -> None:
    directory = tmp_path / "run"
    if layout is None:
        shutil.copytree(of_moe, directory)
    else:
        trainer(moe(), directory, StreamingCheckpointCallback(layout)).train()
    straight = contents(directory / "checkpoint-4")
    torch.rand(3)  # a generator that stands elsewhere
    resumed = trainer(moe(seed=5), directory, StreamingCheckpointCallback(layout))
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
    again = contents(directory / "checkpoint-4")
    if layout is None:  # the arguments name another directory
        del straight["training_args.bin"], again["training_args.bin"]
    assert again == straight


def test_plain_trainer_leaves_experts_random_where_we_resume_them(of_moe: Path, tmp_path: Path) -> None:
    # transformers issue 48805. If the first half fails, it has been repaired there.
    checkpoint = str(of_moe / "checkpoint-4")
    wanted = transformers.Qwen3MoeForCausalLM.from_pretrained(checkpoint).state_dict()
    experts = {name for name in wanted if ".experts." in name}
    assert experts

    before = weights_of(moe(seed=5))
    plain = trainer(moe(seed=5), tmp_path)
    plain._load_from_checkpoint(checkpoint)
    after = plain.model.state_dict()
    assert {name for name in after if torch.equal(after[name], before[name])} >= experts
    assert not {name for name in after if not torch.equal(after[name], wanted[name])} - experts

    ours = trainer(moe(seed=5), tmp_path, StreamingCheckpointCallback())
    places = {name: tensor.data_ptr() for name, tensor in ours.model.state_dict().items()}
    ours._load_from_checkpoint(checkpoint)
    assert differing(dict(ours.model.state_dict()), dict(wanted)) == []
    assert {name: tensor.data_ptr() for name, tensor in ours.model.state_dict().items()} == places


def test_checkpoints_hold_what_those_of_plain_trainer_hold(of_llama: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(of_llama, kept)
    try:
        trainer(llama(), of_llama, StreamingCheckpointCallback()).train()
        for name in ("checkpoint-2", "checkpoint-4"):
            plain, ours = contents(kept / name), contents(of_llama / name)
            pickled = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
            nested = {file.split(".")[0] + ".safetensors" for file in pickled}
            assert plain.keys() - pickled == ours.keys() - nested
            assert nested <= ours.keys()
            assert all(ours[file] == content for file, content in plain.items() if file not in pickled)
            for file in pickled:
                wanted = torch.load(kept / name / file, weights_only=False)
                got = load_nested(of_llama / name / (file.split(".")[0] + ".safetensors"))
                assert differing(got, wanted) == []
    finally:
        shutil.rmtree(of_llama)
        shutil.copytree(kept, of_llama)


def test_a_checkpoint_of_plain_trainer_is_resumed(of_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(of_llama / "checkpoint-2", directory / "checkpoint-2")
    run = trainer(llama(seed=5), directory, StreamingCheckpointCallback(packed_gate_up()))
    run.train(resume_from_checkpoint=True)
    wanted = load_file(of_llama / "checkpoint-4" / WEIGHTS)
    assert differing(dict(sorted(run.model.state_dict().items())), dict(sorted(wanted.items()))) == []
    # The layout holds for what is saved from here on.
    assert any("gate_up" in name for name in load_file(directory / "checkpoint-4" / WEIGHTS))
    assert (
        differing(
            load_nested(directory / "checkpoint-4" / "optimizer.safetensors"),
            torch.load(of_llama / "checkpoint-4" / "optimizer.pt"),
        )
        == []
    )


def test_what_plain_trainer_wrote_over_a_checkpoint_counts(of_moe: Path, of_llama: Path, tmp_path: Path) -> None:
    ours, plain = of_moe / "checkpoint-2", of_llama / "checkpoint-2"
    run = trainer(llama(), tmp_path, StreamingCheckpointCallback())
    run.create_optimizer_and_scheduler(4)
    shutil.copytree(ours, tmp_path / "checkpoint-2")
    shutil.copytree(plain, tmp_path / "checkpoint-2", dirs_exist_ok=True)
    run._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-2"))
    run._load_rng_state(str(tmp_path / "checkpoint-2"))
    assert torch.equal(torch.get_rng_state(), torch.load(plain / "rng_state.pth", weights_only=False)["cpu"])
    assert differing(run.optimizer.state_dict(), torch.load(plain / "optimizer.pt")) == []


def test_from_pretrained_loads_a_checkpoint_without_a_layout(of_moe: Path) -> None:
    model, info = transformers.Qwen3MoeForCausalLM.from_pretrained(of_moe / "checkpoint-4", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.architectures == ["Qwen3MoeForCausalLM"]


def test_weights_that_were_pickled_by_older_trainers_are_resumed(of_moe: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(of_moe / "checkpoint-2", checkpoint)
    torch.save(load_file(checkpoint / WEIGHTS), checkpoint / "pytorch_model.bin")
    (checkpoint / WEIGHTS).unlink()
    run = trainer(moe(seed=5), tmp_path, StreamingCheckpointCallback())
    run.state.best_model_checkpoint = str(checkpoint)
    for load in (lambda: run._load_from_checkpoint(str(checkpoint)), run._load_best_model):
        nn.init.zeros_(run.model.lm_head.weight)
        load()
        wanted = transformers.Qwen3MoeForCausalLM.from_pretrained(of_moe / "checkpoint-2").state_dict()
        assert differing(dict(run.model.state_dict()), dict(wanted)) == []


def edited(checkpoint: Path, directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(checkpoint, directory)
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight"),
        (lambda tensors: tensors.pop("model.layers.0.mlp.experts.3.up_proj.weight"), "layers.0.mlp.experts"),
        (lambda tensors: tensors.update(stray=torch.ones(2)), "stray"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight"),
    ],
    ids=["missing", "missing-part", "left-over", "shape"],
)
def test_a_weight_that_does_not_fit_is_an_error_that_names_it(
    of_moe: Path, tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], Any], named: str
) -> None:
    checkpoint = edited(of_moe / "checkpoint-2", tmp_path / "run" / "checkpoint-2", edit)
    run = trainer(moe(seed=5), checkpoint.parent, StreamingCheckpointCallback())
    before = weights_of(run.model)
    with pytest.raises(hf_stream.HfStreamError, match=named):
        run.train(resume_from_checkpoint=True)
    assert differing(dict(run.model.state_dict()), before) == []


def test_another_layout_than_the_checkpoints_is_noticed(tmp_path: Path) -> None:
    config = llama().config
    right = packed_qkv(config)
    trainer(llama(), tmp_path, StreamingCheckpointCallback(right), max_steps=2).train()
    assert any("qkv" in name for name in load_file(tmp_path / "checkpoint-2" / WEIGHTS))

    with pytest.raises(CheckpointError, match="pass it to the callback"):
        trainer(llama(), tmp_path, StreamingCheckpointCallback()).train(resume_from_checkpoint=True)
    # Same names, same shapes, other rows: nothing but the name of the layout can tell.
    other = packed_qkv(transformers.LlamaConfig(**{**SIZES, "num_attention_heads": 1, "num_key_value_heads": 1}))
    if other != right:
        with pytest.raises(CheckpointError, match="another layout"):
            trainer(llama(), tmp_path, StreamingCheckpointCallback(other)).train(resume_from_checkpoint=True)
    run = trainer(llama(seed=5), tmp_path, StreamingCheckpointCallback(right))
    run._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert not hf_stream.verify(right(run.model.state_dict()), tmp_path / "checkpoint-2")


def test_a_layout_that_has_no_name_is_taken_at_its_word(tmp_path: Path) -> None:
    def doubled() -> Layout:
        name = "model.norm.weight"
        return Layout([Apply(name, name, partial(torch.mul, torch.tensor(2.0)), inverse=lambda w: w / 2)])

    trainer(llama(), tmp_path, StreamingCheckpointCallback(doubled()), max_steps=2).train()
    assert json.loads((tmp_path / "checkpoint-2" / "hf_stream.json").read_text()) == {"layout": None}
    run = trainer(llama(seed=5), tmp_path, StreamingCheckpointCallback(doubled()))
    run._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    saved = load_file(tmp_path / "checkpoint-2" / WEIGHTS)
    assert torch.equal(run.model.state_dict()["model.norm.weight"] * 2, saved["model.norm.weight"])


def test_a_layout_without_a_way_back_is_refused_at_once() -> None:
    with pytest.raises(LayoutError, match="cannot be inverted"):
        StreamingCheckpointCallback(Layout([Drop("x")]))
    with pytest.raises(LayoutError, match="must have an inverse"):
        StreamingCheckpointCallback(dict)  # type: ignore[arg-type]


@pytest.mark.parametrize("callback", [True, False], ids=["ours", "plain"])
def test_best_checkpoints_are_kept_and_loaded(tmp_path: Path, callback: bool) -> None:
    # The loss falls, so with more counting as better the first checkpoint is the best.
    directory = tmp_path / "run"
    callbacks = [StreamingCheckpointCallback()] if callback else []
    run = trainer(
        moe() if callback else llama(),
        directory,
        *callbacks,
        max_steps=6,
        **EVALUATES,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        save_total_limit=2,
    )
    run.train()
    assert names(directory) == ["checkpoint-2", "checkpoint-6"]
    best = str(directory / "checkpoint-2")
    assert run.state.best_model_checkpoint == best
    for name in names(directory):
        assert json.loads((directory / name / "trainer_state.json").read_text())["best_model_checkpoint"] == best
    if callback:
        wanted = transformers.Qwen3MoeForCausalLM.from_pretrained(directory / "checkpoint-2").state_dict()
        assert differing(dict(run.model.state_dict()), dict(wanted)) == []


def test_with_room_for_one_only_the_best_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **kwargs: (removed.append(str(path)), remove(path, **kwargs)))
    run = trainer(
        llama(),
        tmp_path,
        StreamingCheckpointCallback(),
        **EVALUATES,
        metric_for_best_model="loss",
        greater_is_better=True,
        save_total_limit=1,
    )
    run.train()
    assert names(tmp_path) == ["checkpoint-2"]
    # File by file, nothing is removed that is still called a checkpoint.
    assert "removed" in removed
    assert not any(path.endswith("checkpoint-4") for path in removed)


def test_nothing_is_removed_before_the_best_model_has_been_loaded(tmp_path: Path) -> None:
    arguments = {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    run = trainer(llama(), tmp_path, StreamingCheckpointCallback(), **EVALUATES, **arguments, save_total_limit=1)
    load = run._load_best_model

    def failing() -> None:
        raise RuntimeError

    vars(run)["_load_best_model"] = failing
    with pytest.raises(RuntimeError):
        run.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    vars(run)["_load_best_model"] = load
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert names(tmp_path) == ["checkpoint-2"]


def test_what_is_being_uploaded_is_not_written_to(tmp_path: Path) -> None:
    run = trainer(llama(), tmp_path, StreamingCheckpointCallback())
    waited = []
    vars(run)["_finish_current_push"] = lambda: waited.append(names(tmp_path))
    run.save_model(str(tmp_path / "elsewhere"))
    assert waited == []
    run.save_model()
    assert waited == [["elsewhere"]]
    assert WEIGHTS in names(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "checkpoints"),
    [
        ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}, ["checkpoint-12", "checkpoint-6"]),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, ["checkpoint-2", "checkpoint-4"]),
        ({"save_strategy": "no"}, []),
    ],
    ids=["epoch", "best", "no"],
)
def test_it_is_saved_when_the_arguments_say_so(
    tmp_path: Path, arguments: dict[str, Any], checkpoints: list[str]
) -> None:
    trainer(llama(), tmp_path, StreamingCheckpointCallback(), **EVALUATES, **arguments).train()
    assert names(tmp_path) == checkpoints


def test_save_only_model_saves_no_states(tmp_path: Path) -> None:
    trainer(llama(), tmp_path, StreamingCheckpointCallback(), save_only_model=True, max_steps=2).train()
    assert names(tmp_path / "checkpoint-2") == [
        "config.json",
        "generation_config.json",
        WEIGHTS,
        "trainer_state.json",
        "training_args.bin",
    ]


def test_shards_and_the_final_model_are_as_asked(tmp_path: Path) -> None:
    callback = StreamingCheckpointCallback(stacked_experts(), max_shard_size="5KB")
    run = trainer(moe(), tmp_path, callback, max_steps=2)
    run.train()
    run.save_model(str(tmp_path / "final"))
    shards = list((tmp_path / "checkpoint-2").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not hf_stream.verify(tmp_path / "checkpoint-2", tmp_path / "final")
    again = trainer(moe(seed=5), tmp_path, StreamingCheckpointCallback(stacked_experts()))
    again._load_from_checkpoint(str(tmp_path / "final"))
    assert differing(dict(again.model.state_dict()), weights_of(run.model)) == []


def test_trials_of_a_search_have_their_own_directories(tmp_path: Path) -> None:
    run = trainer(llama(), tmp_path, StreamingCheckpointCallback())
    run.hp_search_backend = HPSearchBackend.OPTUNA
    run.create_optimizer_and_scheduler(4)
    run.state.global_step = 3
    (tmp_path / "run-7" / "_checkpoint-2.hf-stream" / "checkpoint-2").mkdir(parents=True)  # left by a killed process
    run._save_checkpoint(run.model, trial=SimpleNamespace(number=7))
    assert names(tmp_path) == ["run-7"]
    assert names(tmp_path / "run-7") == ["checkpoint-3"]
    assert "optimizer.safetensors" in names(tmp_path / "run-7" / "checkpoint-3")


def test_subclasses_that_extend_the_methods_are_heard(tmp_path: Path) -> None:
    calls = []

    class Extended(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            calls.append(get_last_checkpoint(str(tmp_path)))

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            Path(str(output_dir), "mine.txt").touch()

    trainer(moe(), tmp_path, StreamingCheckpointCallback(), cls=Extended, max_steps=2).train()
    assert calls == [str(tmp_path / "checkpoint-2")]
    assert {"mine.txt", "rng_state.safetensors"} <= set(names(tmp_path / "checkpoint-2"))


def test_the_gradient_scaler_comes_back(tmp_path: Path) -> None:
    def run() -> Trainer:
        run = trainer(llama(), tmp_path, StreamingCheckpointCallback())
        run.accelerator.scaler = torch.amp.GradScaler("cpu")
        return run

    first, second = run(), run()
    first.accelerator.scaler.load_state_dict(
        {**first.accelerator.scaler.state_dict(), "scale": 3.5, "_growth_tracker": 7}
    )
    first._save_scaler(str(tmp_path))
    assert names(tmp_path) == ["scaler.safetensors"]
    second._load_scaler(str(tmp_path))
    assert second.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
