"""Layouts whose functions make tensors and fill them: nothing is computed before it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from memory_peaks import in_fresh_process
from safetensors.torch import load_file, save_file
from samples import same_bits

import hf_stream
from hf_stream import plan_conversion
from hf_stream.copying import Region
from hf_stream.layouts import Apply, Layout
from hf_stream.lazy import LazyTensor

MIB = 1 << 20


def joined(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Rows of q and k by turns."""
    out = torch.empty(2 * len(q), q.shape[1], dtype=q.dtype)
    out[::2] = q
    out[1::2] = k
    return out


def apart(qk: torch.Tensor) -> list[torch.Tensor]:
    both = qk.new_zeros(2, len(qk) // 2, qk.shape[1])
    both[0], both[1] = qk[::2], qk[1::2]
    return [both[0], both[1]]


PAIRS = Apply(["layers.{i}.q", "layers.{i}.k"], "layers.{i}.qk", joined, apart)


def plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same as a function of all tensors."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(".q"):
            result[name + "k"] = joined(tensor, tensors[name[:-1] + "k"])
        elif not name.endswith(".k"):
            result[name] = tensor
    return result


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.{x}": torch.randn(6, 4) for i in range(3) for x in "qk"} | {"norm": torch.randn(4)}


@pytest.mark.parametrize("layout", [Layout([PAIRS]), plain], ids=["rule", "function"])
def test_a_plan_reads_nothing_and_the_result_is_that_of_eager_torch(tmp_path, tensors, layout, caplog) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    plan = plan_conversion(tmp_path / "a.safetensors", tmp_path / "b.safetensors", layout=layout)
    assert all(isinstance(tensor, LazyTensor) for tensor in plan.tensors.values())
    # What is filled, and what is written into it at a time.
    assert plan.peak_nbytes(0) == 192 + 96
    assert sum(plan.nbytes_read().values()) == (3 * 2 * 6 + 1) * 16

    hf_stream.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", layout=layout, verify=True)
    written, wanted = load_file(tmp_path / "b.safetensors"), layout(tensors)
    assert written.keys() == wanted.keys()
    assert all(same_bits(written[name], tensor) for name, tensor in wanted.items())
    assert not hf_stream.verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", layout=layout)
    assert "cannot be planned" not in caplog.text


def test_the_way_back_and_streams_fill_as_well(tmp_path, tensors) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    layout = Layout([PAIRS])
    packed = layout(hf_stream.open_checkpoint(tmp_path / "a.safetensors"))
    assert all(isinstance(tensor, LazyTensor) for tensor in packed.values())
    back = hf_stream.materialize(layout.inverse(packed))
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], tensor) for name, tensor in tensors.items())
    streamed = dict(layout.stream(hf_stream.open_checkpoint(tmp_path / "a.safetensors").items()))
    assert all(isinstance(tensor, LazyTensor) for tensor in streamed.values())
    assert all(same_bits(streamed[name].materialize(), tensor) for name, tensor in layout(tensors).items())


def test_only_the_group_that_is_wanted_is_read(tmp_path, tensors, counting_file) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    file = counting_file(tmp_path / "a.safetensors")
    start = file.nbytes - 3 * 2 * 96 - 16
    places = {name: start + 96 * place for place, name in enumerate(name for name in tensors if name != "norm")}
    lazies = {
        name: LazyTensor.from_region(Region.contiguous(file, torch.float32, (6, 4), offset))
        for name, offset in places.items()
    }
    packed = Layout([PAIRS])(lazies)
    assert not file.read_counts.any()
    packed["layers.1.qk"].materialize()
    assert file.read_counts.sum() == 2 * 96


def test_an_error_in_the_function_names_tensors_and_rule_and_reads_nothing(tmp_path, tensors) -> None:
    tensors["layers.1.k"] = torch.randn(5, 4)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(
        hf_stream.LayoutError, match=r"'layers\.1\.q', 'layers\.1\.k': the function failed on .*\[5, 4\]"
    ):
        hf_stream.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", layout=Layout([PAIRS]))
    assert not (tmp_path / "b.safetensors").exists()


CONVERTED = """
import json, sys
import hf_stream
from hf_stream import plan_conversion
from hf_stream.layouts import Layout
from memory_peaks import anonymous, peak_of

from test_filling_functions import PAIRS, plain

source, small = sys.argv[1:]
for layout in (Layout([PAIRS]), plain):
    hf_stream.convert(small, source + ".small", layout=layout, progress=False)  # imports, and threads' stacks
    before = anonymous()
    plan = plan_conversion(source, source + ".packed", layout=layout)
    held, most = anonymous() - before, plan.peak_nbytes(1 << 20)
    run = lambda: hf_stream.convert(source, source + ".packed", layout=layout, buffer_size=1 << 20, progress=False)
    print(json.dumps([held, most, peak_of(run)]))
"""


def test_a_conversion_takes_the_memory_that_its_plan_says(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    large = {f"layers.{i}.{x}": torch.zeros(1024, 4096) for i in range(8) for x in "qk"}
    save_file(large, tmp_path / "large.safetensors")
    save_file(tensors, tmp_path / "small.safetensors")
    here = str(Path(__file__).parent)
    code = f"import sys\nsys.path.insert(0, {here!r})\n{CONVERTED}"
    for line in in_fresh_process(code, tmp_path / "large.safetensors", tmp_path / "small.safetensors").splitlines():
        held, most, peak = json.loads(line)
        assert held < 2 * MIB
        assert most == (1 + 32 + 16) * MIB
        assert peak < most + 8 * MIB
