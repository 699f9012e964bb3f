from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hf_stream import layouts
from hf_stream.errors import LayoutError

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 4}


def test_every_name_has_a_description_of_one_line_and_a_layout_with_an_inverse() -> None:
    assert {"packed-qkv", "packed-gate-up", "stacked-experts", "from-transformers"} <= layouts.names().keys()
    for name, description in layouts.names().items():
        assert 0 < len(description) < 90
        assert "\n" not in description
        if name.endswith("=PATH"):
            continue  # what it stands for must be there
        layout = layouts.get(name, {**CONFIG, "model_type": "qwen3_moe"})
        if name != "dequantize-fp8-blocks":
            assert layout.inverse.inverse == layout


def test_get_hands_the_config_on() -> None:
    assert layouts.get("packed-qkv", CONFIG) == layouts.packed_qkv(CONFIG)
    assert layouts.get("packed-qkv-per-head", CONFIG) == layouts.packed_qkv(CONFIG, style="per_head")
    assert layouts.get("packed-qkv-per-group", CONFIG) == layouts.packed_qkv(CONFIG, style="per_group")
    assert layouts.get("packed-gate-up") == layouts.packed_gate_up()
    assert layouts.get("stacked-experts", CONFIG) == layouts.stacked_experts(CONFIG)
    assert layouts.get("stacked-experts-mixtral") == layouts.stacked_experts(names="mixtral")


@pytest.mark.parametrize(
    ("config", "block_size"),
    [
        (None, (128, 128)),
        ({}, (128, 128)),
        ({"quantization_config": {"weight_block_size": [64, 32]}}, (64, 32)),
        ({"text_config": {"quantization_config": {"weight_block_size": [64, 32]}}}, (64, 32)),
        ({"quantization_config": {"weight_block_size": None}}, None),
        ({"quantization_config": {}}, (128, 128)),
    ],
)
def test_blocks_are_those_of_the_config(config: object, block_size: tuple[int, int] | None) -> None:
    wanted = layouts.dequantize_fp8_blocks(block_size, suffix="_scale_inv")
    assert layouts.get("dequantize_fp8_blocks", config) == wanted


def test_a_name_that_is_not_known_is_answered_with_those_that_are() -> None:
    with pytest.raises(LayoutError, match=r"Did you mean 'packed-qkv'\? .*stacked-experts"):
        layouts.get("packed_qvk")
    with pytest.raises(LayoutError, match="needs the number of heads"):
        layouts.get("packed-qkv-per-head", {})


FILE = """
from __future__ import annotations

import dataclasses

from hf_stream.layouts import Layout, Rename

@dataclasses.dataclass
class Sizes:
    heads: int = 8

fixed = Layout([Rename("a", "b")])

def sized(config):
    return Layout([Rename("a", f"b{config['n']}")])

def keyword_only(*, config=None):
    return sized(config)

def function(tensors):
    return {name.upper(): tensor for name, tensor in tensors.items()}

class Callable:
    def __call__(self, tensors):
        return {"called": tensor for tensor in tensors.values()}

called = Callable()
builtin = dict
number = 3

def wrong(config):
    return 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my: layouts.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fixed", "b"),
        ("sized", "b7"),
        ("keyword_only", "b7"),
        ("function", "A"),
        ("called", "called"),
        ("builtin", "a"),
    ],
)
def test_load_tells_layouts_functions_of_config_and_functions_of_tensors_apart(
    file: Path, name: str, wanted: str
) -> None:
    layout = layouts.load(f"{file}:{name}", config={"n": 7})
    assert list(layout({"a": torch.zeros(1)})) == [wanted]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no 'nothing'. It has: Layout, Rename, Sizes, fixed, sized"),
        ("number", "must be a Layout or a function, got int"),
        ("wrong", "must be a Layout or a function, got int"),
    ],
)
def test_load_refuses_what_is_not_a_layout(file: Path, name: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        layouts.load(f"{file}:{name}")


def test_load_refuses_what_is_not_a_file_of_python(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"path/to/file\.py:name"):
        layouts.load("packed-qkv")
    with pytest.raises(LayoutError, match="is not a file"):
        layouts.load(f"{tmp_path / 'absent.py'}:x")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(LayoutError, match=r"broken\.py' failed: ZeroDivisionError: division by zero"):
        layouts.load(f"{broken}:x")
