"""Pushes and loads for tests, in a process that speaks to a Hub of the test's: `python pushes.py NAME ARGUMENTS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig

import hf_stream
from hf_stream.layouts import Layout, Rename

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=96,
            hidden_size=32,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
        )
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def check_loads(model: Any, repo_id: str, **kwargs: Any) -> None:
    """Plain transformers loads from the Hub what was pushed to it."""
    loaded = type(model).from_pretrained(repo_id, **kwargs)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))


def twice(top: str) -> None:
    """Push models with plain transformers to `plain-*`, and with hf_stream to `ours-*`: new, changed and unchanged."""
    for name in MODELS:
        for kind, save in (
            ("plain", transformers.PreTrainedModel.save_pretrained),
            ("ours", hf_stream.save_pretrained),
        ):
            model = made(name)
            directory, repo_id = Path(top, kind, name), f"tester/{kind}-{name}"
            directory.mkdir(parents=True)
            (directory / "notes.txt").write_text("not of this save")
            options: dict[str, Any] = {"push_to_hub": True, "repo_id": repo_id}
            if name == "llama":
                options["max_shard_size"] = "20KB"
            save(model, directory, private=True, **options)
            check_loads(model, repo_id)
            save(model, directory, commit_message="the same again", **options)
            with torch.no_grad():
                model.lm_head.weight += 1
            save(model, str(directory), commit_message="changed", token="hf_localtoken", create_pr=True, **options)
            check_loads(model, repo_id, revision="refs/pr/1")


def others(top: str) -> None:
    """Push without `repo_id`, an adapter, through a layout, by the method of a streaming class, without the right."""
    assert HfApi().whoami()["name"] == "tester"
    model = made("llama")
    layout = Layout([Rename("model.{rest:*}", "inner.{rest}")])
    hf_stream.save_pretrained(model, Path(top, "renamed"), layout=layout, push_to_hub=True)
    hf_stream.save_pretrained(model, Path(top, "my-model"), push_to_hub=True)
    check_loads(model, "tester/my-model")

    class Streaming(hf_stream.StreamingMixin, transformers.LlamaForCausalLM):
        layout = None

    streaming = Streaming(model.config)
    streaming.load_state_dict(model.state_dict())
    for repo_id, one in (("plain-branch", model), ("ours-branch", streaming)):
        one.push_to_hub(repo_id, revision="dev", commit_message="by method", tags=["small"], max_shard_size="20KB")

    with pytest.raises(HfHubHTTPError, match="401"):
        hf_stream.save_pretrained(model, Path(top, "refused"), push_to_hub=True, token="hf_wrong")
    assert not list(Path(top).glob("*refused*"))

    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    hf_stream.save_pretrained(model, Path(top, "my-adapter"), push_to_hub=True)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    globals()[sys.argv[1]](*sys.argv[2:])
