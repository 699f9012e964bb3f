"""A spread of architectures: loading and saving are those of plain transformers; all of them are swept elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import primary_class, random_model, small_config
from round_trips import differences, has_converters, wasted_reads
from samples import files_of

import hf_stream

PLAIN = ["llama", "gpt2", "opt", "t5", "bert", "phi3", "mamba", "jamba", "bart", "deberta-v2", "gpt_oss", "llama4_text"]
SEEN_AND_HEARD = ["vit", "clip", "detr", "swin", "whisper", "wav2vec2", "qwen2_vl", "gemma3"]
# These have a from_pretrained or a save_pretrained of their own.
OF_THEIR_OWN = ["csm", "kyutai_speech_to_text", "qwen2_5_omni", "granite_speech", "jev"]
CONVERTED = ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_vl_moe", "dinov2", "nemotron_h", "minimax"]


@pytest.fixture(scope="module")
def small_model():
    made = {}

    def make(model_type):
        if model_type not in made:
            cls = primary_class(model_type)
            made[model_type] = random_model(cls, small_config(model_type, cls))
        return made[model_type]

    return make


@pytest.mark.parametrize("model_type", [*PLAIN, *SEEN_AND_HEARD, *OF_THEIR_OWN, *CONVERTED])
def test_what_is_loaded_and_written_equals_plain_transformers(small_model, tmp_path, model_type):
    assert list(differences(small_model(model_type), tmp_path, loads=["float16", "partial, float32"])) == []


@pytest.mark.parametrize("model_type", CONVERTED)
def test_conversions_compute_nothing_and_read_what_a_slice_needs(small_model, tmp_path, model_type):
    model = small_model(model_type)
    assert has_converters(model)
    model.save_pretrained(tmp_path / "single")
    assert list(wasted_reads(model, tmp_path / "single")) == []


def test_empty_parameters_go_into_the_shards_where_transformers_puts_them(small_model, tmp_path):
    model = copy.deepcopy(small_model("llama"))
    for place in (0, 1):
        model.model.layers[place].mlp.up_proj.bias = torch.nn.Parameter(torch.empty(0))
    model.lm_head.bias = torch.nn.Parameter(torch.empty(0, 3))
    model.save_pretrained(tmp_path / "plain", max_shard_size="12KB")
    hf_stream.save_pretrained(model, tmp_path / "ours", max_shard_size="12KB")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "plain")
