"""Small models of seven architectures, and the checkpoints that plain transformers writes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "t5": lambda: transformers.T5Config(vocab_size=96, d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, rms_norm_eps=1e-5),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
}
MERGES_EXPERTS = {"qwen3_moe", "mixtral"}
SHARD = "12KB"


def model_class(name: str) -> type:
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    return type(auto.from_config(CONFIGS[name]()))


@pytest.fixture(scope="session")
def random_model() -> Callable[[str], PreTrainedModel]:
    """Make a model whose every parameter is random, by the name of its architecture."""
    made: dict[str, PreTrainedModel] = {}

    def make(name: str) -> PreTrainedModel:
        if name not in made:
            torch.manual_seed(0)
            made[name] = model_class(name)(CONFIGS[name]()).eval()
            with torch.no_grad():
                for parameter in made[name].parameters():
                    parameter.normal_()
        return made[name]

    return make


@pytest.fixture(scope="session")
def saved(
    random_model: Callable[[str], PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Save a random model with plain transformers, once; in shards if asked to."""
    paths: dict[tuple[str, bool], Path] = {}

    def save(name: str, sharded: bool = False) -> Path:
        if (name, sharded) not in paths:
            paths[name, sharded] = tmp_path_factory.mktemp(name)
            # `passed_whole` may be watching the test that asks first.
            with pytest.MonkeyPatch.context() as unwatched:
                unwatched.setattr("transformers.modeling_utils.safe_save_file", safetensors.torch.save_file)
                random_model(name).save_pretrained(paths[name, sharded], max_shard_size=SHARD if sharded else "50GB")
        return paths[name, sharded]

    return save


class _Watched:
    """A file of safetensors' `safe_open`, or a slice of it, which notes what is read of it."""

    def __init__(self, inner: Any, names: list[str], name: str = "") -> None:
        self._inner, self._names, self._name = inner, names, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.__exit__(None, None, None)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._names.append(self._name)
        return self._inner[index]

    def get_tensor(self, name: str) -> torch.Tensor:
        self._names.append(name)
        return self._inner.get_tensor(name)

    def get_slice(self, name: str) -> _Watched:
        return _Watched(self._inner.get_slice(name), self._names, name)


@pytest.fixture
def passed_whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of tensors that transformers has loaded or saved with the safetensors library: none, if it streams."""
    names: list[str] = []

    def watched_open(*args: Any, **kwargs: Any) -> _Watched:
        return _Watched(safetensors.safe_open(*args, **kwargs), names)

    def save(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        names.extend(tensors)
        safetensors.torch.save_file(tensors, *args, **kwargs)

    monkeypatch.setattr("transformers.modeling_utils.safe_open", watched_open)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", save)
    return names


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
