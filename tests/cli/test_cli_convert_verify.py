from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from click.testing import Result
from command_line import CONFIG, assert_same, llama, load, run
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_stream import checkpoint
from hf_stream.copying.progress import Progress
from hf_stream.utils.text import count, size


def test_convert_packs_with_sizes_from_the_config_and_carries_files_along(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"
    result = run("convert", source, destination, "--layout", "packed-qkv-per-group", "--verify")

    wanted = llama()
    for i in range(2):
        q, k, v = (wanted.pop(f"model.layers.{i}.self_attn.{name}_proj.weight") for name in "qkv")
        # 2 key heads of 4 rows, 2 query heads for each.
        groups = [torch.cat([q[8 * g : 8 * g + 8], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4]]) for g in range(2)]
        wanted[f"model.layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(groups)
    assert_same(load(destination), wanted)
    assert json.loads((destination / "config.json").read_text()) == CONFIG
    assert (destination / "more" / "tokenizer.json").read_text() == "{}"
    assert (result.exit_code, result.stdout) == (0, f"{destination}\n")
    assert re.fullmatch(
        r"read 6\.21 KB, wrote \d\.\d\d KB in 1 file, verified, in \d+\.\d s: \d+ MB/s\n", result.stderr
    )


def test_convert_and_its_inverse_lead_back_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    assert run("convert", source, tmp_path / "packed", "-l", "packed-qkv", "--max-shard-size", "4KB").exit_code == 0
    assert run("convert", tmp_path / "packed", tmp_path / "back", "-l", "packed-qkv", "--inverse").exit_code == 0

    assert len(list((tmp_path / "packed").glob("*.safetensors"))) == 3
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_layouts_apply_from_left_to_right_and_their_inverse_from_right_to_left(
    source: Path, layout_file: Path, tmp_path: Path
) -> None:
    both = ("-l", f"{layout_file}:one", "-l", f"{layout_file}:two")
    turned = (*both[2:], *both[:2])
    assert run("convert", source, tmp_path / "out", *both).exit_code == 0
    assert run("convert", source, tmp_path / "turned", *turned, "--allow-unmatched").exit_code == 0
    assert run("convert", tmp_path / "out", tmp_path / "back", *both, "--inverse").exit_code == 0

    wanted = llama()
    norm = wanted.pop("norm.weight")
    assert_same(load(tmp_path / "out"), wanted | {"last.weight": norm})
    assert_same(load(tmp_path / "turned"), wanted | {"middle.weight": norm})
    assert_same(load(tmp_path / "back"), llama())


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("bf16", torch.bfloat16), ("float16", torch.float16), ("F64", torch.float64), ("fp32", torch.float32)],
)
def test_convert_casts_to_a_type_by_any_of_its_names(
    word: str, dtype: torch.dtype, source: Path, tmp_path: Path
) -> None:
    assert run("convert", source, tmp_path / "out", "--dtype", word).exit_code == 0

    assert_same(load(tmp_path / "out"), {name: tensor.to(dtype) for name, tensor in llama().items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_fp8_blocks_become_bfloat16_and_the_config_says_no_more_of_them(tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    weight, scale = torch.randn(8, 6).to(torch.float8_e4m3fn), torch.rand(2, 2)
    tensors = {"x.weight": weight, "x.weight_scale_inv": scale, "norm": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    config = {"model_type": "deepseek_v3", "torch_dtype": "bfloat16", "quantization_config": quantization}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))

    assert run("convert", tmp_path / "fp8", tmp_path / "out", "--layout", "dequantize_fp8_blocks").exit_code == 0

    factors = scale.repeat_interleave(4, 0).repeat_interleave(4, 1)[:, :6]
    wanted = {"x.weight": (weight.float() * factors).to(torch.bfloat16), "norm": tensors["norm"]}
    assert_same(load(tmp_path / "out"), wanted)
    del config["quantization_config"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_a_model_of_transformers_goes_into_the_tensors_it_holds_and_back(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32, "num_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 8, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads))
    model.save_pretrained(tmp_path / "a")

    assert run("convert", tmp_path / "a", tmp_path / "b", "-l", "from_transformers", "-q").exit_code == 0
    assert_same(load(tmp_path / "b"), dict(model.state_dict()))
    back = run("convert", tmp_path / "b", tmp_path / "c", "-l", "from-transformers", "--inverse", "-q")
    assert back.exit_code == 0
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()

    for name in ("config.json", "generation_config.json"):
        (tmp_path / "a" / name).unlink()
    result = run("convert", tmp_path / "a", tmp_path / "d", "-l", "from-transformers")
    assert (result.exit_code, "There is no config.json beside" in result.stderr) == (2, True)


def test_convert_to_a_single_file_writes_that_file_and_nothing_else(source: Path, tmp_path: Path) -> None:
    result = run("convert", source / "model.safetensors", tmp_path / "new" / "one.safetensors", "--dtype", "f32")

    assert result.exit_code == 0
    assert_same(load_file(tmp_path / "new" / "one.safetensors"), llama())
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["one.safetensors"]
    assert "wrote" in result.stderr


def test_quiet_leaves_the_path_only(source: Path, tmp_path: Path) -> None:
    result = run("convert", source, tmp_path / "out", "--quiet")
    assert (result.stdout, result.stderr) == (f"{tmp_path / 'out'}\n", "")

    result = run("verify", source, tmp_path / "out", "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def convert_with(monkeypatch: pytest.MonkeyPatch, progress: Progress, *args: str | Path) -> Result:
    convert = checkpoint.run_conversion
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint, "run_conversion", lambda *args, **options: convert(*args, **{**options, "progress": progress})
        )
        return run("convert", *args)


class Tamper:
    """Progress that changes the last byte of a file as soon as all of it is copied."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.left = 1552 * 4

    def update(self, n: int) -> None:
        self.left -= n
        if self.left == 0:
            content = self.file.read_bytes()
            self.file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_verify_compares_what_was_written_with_the_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper = Tamper(source / "model.safetensors")
    result = convert_with(monkeypatch, tamper, source, tmp_path / "out", "--verify")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "would differ from what was to be written" in result.stderr
    assert not (tmp_path / "out").exists()

    tamper = Tamper(source / "model.safetensors")
    result = convert_with(monkeypatch, tamper, source, tmp_path / "out")
    assert (result.exit_code, "was changed while it was in use" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


class Stop:
    """Progress that presses ctrl-C when a shard and a half are written."""

    def __init__(self) -> None:
        self.nbytes = 0

    def update(self, n: int) -> None:
        self.nbytes += n
        if self.nbytes > 4000:
            raise KeyboardInterrupt


def test_an_interrupted_conversion_says_how_to_go_on_and_does(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-shard-size", "2KB", "-l", "packed-qkv")
    result = convert_with(monkeypatch, Stop(), source, tmp_path / "out", *options)
    assert (result.exit_code, result.stdout) == (130, "")
    work = tmp_path / ".out.hf-stream"
    finished = {file.name: file.stat().st_size for file in (work / "files").glob("*.safetensors")}
    assert finished
    kept = f"{count(len(finished), 'file')}, {size(sum(finished.values()))}"
    assert result.stderr == (
        f"\ninterrupted: '{work}' keeps {kept.replace(' file', ' finished file')}; the same command goes on from "
        f"there, and 'hf-stream clean {tmp_path / 'out'}' removes what is kept\n"
    )
    assert not (tmp_path / "out").exists()

    plan = json.loads(run("plan", source, tmp_path / "out", *options, "--json").stdout)
    assert {entry["file"]: entry["nbytes"] for entry in plan["keep"]} == finished
    assert not json.loads(run("plan", source, tmp_path / "out", *options, "--no-resume", "--json").stdout)["keep"]
    assert not json.loads(run("plan", source, tmp_path / "other", *options, "--json").stdout)["keep"]

    again = run("convert", source, tmp_path / "out", *options)
    assert again.exit_code == 0
    first, second = again.stderr.splitlines()
    written = [entry for entry in plan["write"] if entry["tensors"]]
    assert first.startswith(f"read {size(plan['nbytes_read'])}, wrote ")
    assert f" in {count(len(written), 'file')} in " in first
    assert second == f"took over {kept}, of an interrupted run"
    assert len(written) + len(finished) == len(list((tmp_path / "out").glob("*.safetensors")))
    fresh = run("convert", source, tmp_path / "fresh", *options)
    assert "interrupted" not in fresh.stderr
    assert_same(load(tmp_path / "out"), load(tmp_path / "fresh"))


def test_what_is_replaced_is_said_beforehand_and_afterwards(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    new = run("convert", source, out, "--max-shard-size", "2KB")
    (out / "notes.txt").write_text("mine")
    assert "replaced" not in new.stderr
    before = {str(file.relative_to(out)): file.stat().st_size for file in out.rglob("*") if file.is_file()}
    del before["notes.txt"]

    plan = json.loads(run("plan", source, out, "--json").stdout)
    assert {entry["file"]: entry["nbytes"] for entry in plan["replace"]} == before
    assert not json.loads(run("plan", source, "--json").stdout)["replace"]

    again = run("convert", source, out)
    nbytes = size(sum(before.values()))
    assert again.stderr.splitlines()[1:] == [f"replaced {len(before)} files in '{out}', {nbytes}"]
    assert (out / "notes.txt").read_text() == "mine"

    file = tmp_path / "one.safetensors"
    assert "replaced" not in run("convert", source, file).stderr
    again = run("convert", source, file)
    assert again.stderr.splitlines()[1:] == [f"replaced '{file}', {size(file.stat().st_size)}"]


class Threads:
    """Progress that notes who moves bytes."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def update(self, n: int) -> None:
        self.seen.add(threading.get_ident())


def test_one_thread_is_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(i): torch.full((1 << 20,), float(i)) for i in range(16)}
    save_file(tensors, tmp_path / "a.safetensors")
    threads = Threads()
    options = ("--threads", "1", "--buffer-size", "1MB", "--verify")
    result = convert_with(monkeypatch, threads, tmp_path / "a.safetensors", tmp_path / "out", *options)

    assert result.exit_code == 0
    assert threads.seen == {threading.get_ident()}
    assert_same(load(tmp_path / "out"), tensors)


def test_include_and_exclude_choose_tensors(source: Path, tmp_path: Path) -> None:
    options = ("--include", "*.layers.*", "--include", "norm*", "--exclude", "*.1.*")
    assert run("convert", source, tmp_path / "out", *options).exit_code == 0
    wanted = {name: tensor for name, tensor in llama().items() if ".layers.0." in name or name == "norm.weight"}
    assert_same(load(tmp_path / "out"), wanted)
    listed = json.loads(run("inspect", source, *options, "--json").stdout)
    assert {tensor["name"] for tensor in listed["tensors"]} == wanted.keys()
    assert listed["nbytes"] == sum(tensor.nbytes for tensor in wanted.values())
    assert run("inspect", source, *options).stdout.splitlines()[-1] == "4 tensors in 1 file: 528 elements, 2.11 KB"


def test_an_interrupted_conversion_without_resume_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.rglob("*"))
    options = ("--max-shard-size", "2KB", "--no-resume")
    result = convert_with(monkeypatch, Stop(), source, tmp_path / "out", *options)

    assert result.exit_code == 130
    assert result.stderr == "\ninterrupted: nothing is left behind\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_verify_tells_equal_from_different_by_its_exit_code(source: Path, tmp_path: Path) -> None:
    changed = llama()
    changed["norm.weight"][3] += 1
    changed["model.embed_tokens.weight"] = changed["model.embed_tokens.weight"].half()
    changed["new"] = changed.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(changed, tmp_path / "changed.safetensors")

    equal = run("verify", source, source / "model.safetensors")
    assert (equal.exit_code, equal.stdout, equal.stderr) == (0, "", "equal: 8 tensors, 6.21 KB\n")
    different = run("verify", source, tmp_path / "changed.safetensors")
    assert different.exit_code == 1
    assert different.stderr == "different: 4 tensors\n"
    lines = different.stdout.splitlines()
    assert len(lines) == 4
    assert any(line.startswith("'norm.weight' differs first at [3]") for line in lines)
    assert "'new' is only in the second" in lines
    missing = run("verify", source, tmp_path / "nowhere")
    assert (missing.exit_code, missing.stdout) == (2, "")


def test_verify_applies_the_layout_to_the_first(source: Path, tmp_path: Path) -> None:
    run("convert", source, tmp_path / "packed", "-l", "packed-qkv")

    assert run("verify", source, tmp_path / "packed").exit_code == 1
    assert run("verify", source, tmp_path / "packed", "-l", "packed-qkv").exit_code == 0
    assert run("verify", tmp_path / "packed", source, "-l", "packed-qkv", "--inverse").exit_code == 0


def test_a_rule_that_finds_nothing_is_an_error_unless_it_is_allowed(
    source: Path, layout_file: Path, tmp_path: Path
) -> None:
    layouts = ("-l", "packed-qkv", "-l", f"{layout_file}:two")
    for command in (("convert", source, tmp_path / "out"), ("plan", source), ("verify", source, source)):
        result = run(*command, *layouts)
        assert result.exit_code == 2
        assert "1 of the layout's 2 rules" in result.stderr
        assert "mine.py:two: Rename('middle.weight', 'last.weight')" in result.stderr
        assert result.stderr.rstrip().endswith("--allow-unmatched goes on with a warning.")
        assert not (tmp_path / "out").exists()
    result = run("convert", source, tmp_path / "out", *layouts, "--allow-unmatched")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: 1 of the layout's 2 rules")
    result = run("verify", source, tmp_path / "out", *layouts, "--allow-unmatched")
    assert (result.exit_code, "warning: 1 of" in result.stderr) == (0, True)


@pytest.mark.parametrize(
    ("source_of", "options"),
    [
        ("separate", ["-l", "packed-qkv", "--inverse"]),  # the wrong direction
        ("packed", ["-l", "packed-qkv"]),  # converted already
        ("separate", ["-l", "dequantize-fp8-blocks"]),
    ],
)
def test_a_layout_that_finds_nothing_at_all_is_an_error(
    source: Path, tmp_path: Path, source_of: str, options: list[str]
) -> None:
    if source_of == "packed":
        assert run("convert", source, tmp_path / "packed", "-l", "packed-qkv").exit_code == 0
        source = tmp_path / "packed"
    result = run("convert", source, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert "the layout matched none of the" in result.stderr
    assert not (tmp_path / "out").exists()
