from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from trainings import EXPERTS, SIZES, contents, differing, llama, moe, names, quickly, trainer, weights_of

from hf_stream import CheckpointError, Layout, LayoutError, StreamingMixin
from hf_stream.integrations.trainer import StreamingCheckpointCallback
from hf_stream.layouts import Rename, packed_gate_up, stacked_experts

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with quickly():
        yield


def test_a_module_of_ones_own_is_saved_and_resumed(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(SIZES["vocab_size"], 8)
            self.head = nn.Linear(8, SIZES["vocab_size"], bias=False)
            self.head.weight = self.words.weight

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.words(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    layout = Layout([Rename("words.{rest}", "embedding.{rest}")])
    run = trainer(Own(), tmp_path, StreamingCheckpointCallback(layout), max_steps=2)
    run.train()
    assert set(load_file(tmp_path / "checkpoint-2" / WEIGHTS)) == {"embedding.weight", "head.weight"}
    again = trainer(Own(), tmp_path, StreamingCheckpointCallback(layout))
    again._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert torch.equal(again.model.words.weight, run.model.words.weight)
    saved = load_file(tmp_path / "checkpoint-2" / WEIGHTS)
    save_file({**saved, "x": torch.ones(1)}, tmp_path / "checkpoint-2" / WEIGHTS)
    with pytest.raises(CheckpointError, match="'x'"):
        again._load_from_checkpoint(str(tmp_path / "checkpoint-2"))


def test_what_was_saved_of_a_module_stays_whole_until_the_new_files_are(tmp_path: Path) -> None:
    class Interrupts:
        def update(self, n: int) -> None:
            raise KeyboardInterrupt

    module = nn.Sequential(nn.Linear(2, 2))
    trainer(module, tmp_path, StreamingCheckpointCallback()).save_model(str(tmp_path / "final"))
    assert names(tmp_path / "final") == [WEIGHTS, "training_args.bin"]
    before = contents(tmp_path / "final")
    run = trainer(module, tmp_path, StreamingCheckpointCallback(progress=Interrupts()), learning_rate=0.5)
    with pytest.raises(KeyboardInterrupt):
        run.save_model(str(tmp_path / "final"))
    assert contents(tmp_path / "final") == before


def test_what_a_final_model_is_saved_over_leads_nowhere(tmp_path: Path) -> None:
    """As in a downloaded directory, whose files may be links."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for kind, model in (("module", nn.Sequential(nn.Linear(2, 2))), ("model", llama())):
        final = tmp_path / kind
        final.mkdir()
        for name in ("hf_stream.json", *(["training_args.bin"] if kind == "module" else [])):
            (final / name).symlink_to(precious)
        run = trainer(model, tmp_path, StreamingCheckpointCallback(Layout([])))
        run.save_model(str(final))
        assert precious.read_text() == "precious"
        assert not any(path.is_symlink() for path in final.iterdir())
        assert (final / "hf_stream.json").read_text() == '{\n  "layout": "Layout([])"\n}\n'


@pytest.mark.parametrize(
    "content",
    [None, b"", b"[]", b"5", b"{}", b'{"layout": 5}', b'{"layout": ["x"]}', b"[" * 100_000, b"\xff"],
    ids=lambda content: f"{content!r:.20}",
)
def test_a_layout_record_that_we_have_not_written_is_an_error_in_words(tmp_path: Path, content: bytes | None) -> None:
    llama().save_pretrained(tmp_path / "checkpoint-1")
    record = tmp_path / "checkpoint-1" / "hf_stream.json"
    if content is None:
        os.mkfifo(record)
    else:
        record.write_bytes(content)
    run = trainer(llama(seed=1), tmp_path, StreamingCheckpointCallback(Layout([])))
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=re.escape(str(record))):
        run._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel], ids=["compiled", "parallel"]
)
def test_a_model_in_a_wrapper_is_saved_and_resumed_as_the_model_itself(
    tmp_path: Path, wrap: Callable[[Any], Any]
) -> None:
    run = trainer(wrap(moe()), tmp_path, StreamingCheckpointCallback(stacked_experts()))
    run.save_model(str(tmp_path / "checkpoint-1"))
    trainer(moe(), tmp_path, StreamingCheckpointCallback(stacked_experts())).save_model(str(tmp_path / "bare"))
    assert contents(tmp_path / "checkpoint-1")[WEIGHTS] == contents(tmp_path / "bare")[WEIGHTS]
    bare = trainer(moe(seed=5), tmp_path, StreamingCheckpointCallback(stacked_experts()))
    bare._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert differing(weights_of(bare.model), weights_of(moe())) == []

    # Trainer alone saves the wrapper's names.
    trainer(wrap(llama()), tmp_path).save_model(str(tmp_path / "checkpoint-2"))
    assert not load_file(tmp_path / "checkpoint-2" / WEIGHTS).keys() & llama().state_dict().keys()
    again = trainer(wrap(llama(seed=5)), tmp_path, StreamingCheckpointCallback())
    again._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert differing(list(again.model.state_dict().values()), list(llama().state_dict().values())) == []


def without_its_last_layer(model: Any) -> None:
    model.model.layers = model.model.layers[:-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "value", nn.Linear(16, 1)),
        lambda model: setattr(model, "lm_head", nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64))),
        lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
        lambda model: nn.utils.parametrizations.weight_norm(model.lm_head),
        without_its_last_layer,
    ],
    ids=["extra", "replaced", "tied", "parametrized", "fewer"],
)
def test_a_model_that_is_not_what_its_config_says_is_resumed(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    def changed(seed: int) -> Any:
        torch.manual_seed(seed)
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**{**SIZES, **EXPERTS, "num_hidden_layers": 2})
        )
        change(model)
        return model

    run = trainer(changed(0), tmp_path, StreamingCheckpointCallback())
    run.save_model(str(tmp_path / "checkpoint-2"))
    again = trainer(changed(5), tmp_path, StreamingCheckpointCallback())
    assert differing(weights_of(again.model), weights_of(run.model))
    again._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert differing(weights_of(again.model), weights_of(run.model)) == []


def test_the_layout_of_a_streaming_class_comes_before_the_callbacks(tmp_path: Path) -> None:
    class Packed(StreamingMixin, transformers.LlamaForCausalLM):
        layout = Layout([Rename("transformer.{rest:+}", "model.{rest}")])

    renamed = Layout([Rename("lm_head.weight", "head.weight")])
    config = transformers.LlamaConfig(**SIZES)
    for directory, layout in (("own", None), ("both", renamed)):
        run = trainer(Packed(config), tmp_path / directory, StreamingCheckpointCallback(layout), max_steps=2)
        run.train()
        saved = load_file(tmp_path / directory / "checkpoint-2" / WEIGHTS)
        assert {name.split(".")[0] for name in saved} == {"transformer", "lm_head" if layout is None else "head"}
        again = trainer(Packed(config), tmp_path / directory, StreamingCheckpointCallback(layout))
        again._load_from_checkpoint(str(tmp_path / directory / "checkpoint-2"))
        assert differing(dict(again.model.state_dict()), weights_of(run.model)) == []


def test_what_a_model_never_saves_stays_as_it_is(tmp_path: Path) -> None:
    config = transformers.MarianConfig(
        vocab_size=32,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=16,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    run = trainer(transformers.MarianMTModel(config), tmp_path, StreamingCheckpointCallback())
    run.save_model(str(tmp_path / "checkpoint-1"))
    saved = load_file(tmp_path / "checkpoint-1" / WEIGHTS)
    assert not [name for name in saved if "embed_positions" in name]
    again = trainer(transformers.MarianMTModel(config), tmp_path, StreamingCheckpointCallback())
    again._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert differing(dict(again.model.state_dict()), weights_of(run.model)) == []


# peft asks models for a property that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_left_to_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int) -> Any:
        model = llama(seed=0)
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))

    plain, ours = tmp_path / "plain", tmp_path / "ours"
    trainer(adapted(1), plain).train()
    run = trainer(adapted(1), ours, StreamingCheckpointCallback())
    run.train()
    assert (
        contents(ours / "checkpoint-4")["adapter_model.safetensors"]
        == (contents(plain / "checkpoint-4")["adapter_model.safetensors"])
    )
    assert "optimizer.safetensors" in names(ours / "checkpoint-4")
    again = trainer(adapted(5), ours, StreamingCheckpointCallback())
    again.train(resume_from_checkpoint=str(ours / "checkpoint-2"))
    assert differing(dict(again.model.state_dict()), weights_of(run.model)) == []
    with pytest.raises(LayoutError, match="adapters"):
        trainer(adapted(1), ours, StreamingCheckpointCallback(packed_gate_up()))


def test_a_checkpoint_without_an_optimizer_state_is_resumed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(llama(), tmp_path, StreamingCheckpointCallback()).train()
    (tmp_path / "checkpoint-2" / "optimizer.safetensors").unlink()

    again = trainer(llama(), tmp_path, StreamingCheckpointCallback())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "has no state of an optimizer" in caplog.text
