"""Plain calls of transformers stream where that is switched on, and are plain again afterwards."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from same_models import assert_same
from tokenizers import Tokenizer, models

import hf_stream
from hf_stream.layouts import Layout, Rename

RENAMED = Layout([Rename("model.norm.weight", "model.final.weight")])
HOOKED = ("_load_pretrained_model", "save_pretrained")


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def hooks() -> list[object]:
    return [vars(transformers.PreTrainedModel)[name] for name in HOOKED]


@pytest.fixture(autouse=True, scope="module")
def collected():
    """Models of other tests that still stream are gone, and with them the hook."""
    gc.collect()


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """Nothing is left of it after a test, to the very objects and their order."""
    before = list(vars(transformers.PreTrainedModel).items())
    yield
    monkeypatch.undo()
    hf_stream.disable()
    after = list(vars(transformers.PreTrainedModel).items())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(value is was for (_, value), (_, was) in zip(after, before, strict=True))


@pytest.fixture
def enabled():
    hf_stream.enable()
    yield
    hf_stream.disable()


def loads_and_saves(path: Path, target: Path, cls=transformers.LlamaForCausalLM, **arguments) -> None:
    """Load and save with plain calls."""
    cls.from_pretrained(path, **arguments).save_pretrained(target)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "t5"])
def test_plain_calls_stream_and_give_what_they_gave(saved, tmp_path, passed_whole, name):
    cls = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    ours = cls.from_pretrained(saved(name, True), dtype="auto")
    ours.save_pretrained(tmp_path / "ours", True, ours.state_dict(), False, "1GB", "fp16")
    assert passed_whole == []
    hf_stream.disable()
    plain = cls.from_pretrained(saved(name, True), dtype="auto")
    plain.save_pretrained(tmp_path / "plain", True, plain.state_dict(), False, "1GB", "fp16")
    assert passed_whole
    assert_same(ours, plain)
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


@pytest.mark.usefixtures("enabled")
def test_a_pipeline_streams(saved, passed_whole):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    pipeline = transformers.pipeline("feature-extraction", model=str(saved("llama")), tokenizer=tokenizer)
    assert passed_whole == []
    hf_stream.disable()
    plain = transformers.pipeline("feature-extraction", model=str(saved("llama")), tokenizer=tokenizer)
    assert pipeline("a") == plain("a")


@pytest.mark.usefixtures("enabled")
def test_trainer_saves_streaming(saved, tmp_path, passed_whole):
    model = transformers.AutoModelForCausalLM.from_pretrained(saved("qwen3_moe"))
    arguments = transformers.TrainingArguments(tmp_path / "runs", report_to=[], use_cpu=True, save_strategy="no")
    transformers.Trainer(model, arguments).save_model(tmp_path / "ours")
    assert passed_whole == []
    hf_stream.disable()
    transformers.Trainer(model, arguments).save_model(tmp_path / "plain")
    assert passed_whole
    ours, plain = contents(tmp_path / "ours"), contents(tmp_path / "plain")
    assert ours.keys() == plain.keys()
    assert ours["model.safetensors"] == plain["model.safetensors"]


class Overriding(transformers.LlamaForCausalLM):
    """Overrides both methods, as some models of transformers do."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        model = super().from_pretrained(*args, **kwargs)
        model.calls = ["load"]
        return model

    def save_pretrained(self, *args, **kwargs):
        self.calls.append("save")
        super().save_pretrained(*args, **kwargs)


class Mixed(hf_stream.StreamingMixin, Overriding):
    layout = RENAMED.inverse


@pytest.mark.parametrize("around", ["nothing", "enabled", "streaming"])
@pytest.mark.parametrize("how", ["methods", "functions", "auto"])
@pytest.mark.parametrize("cls", [Overriding, Mixed])
def test_ways_to_stream_combine_and_each_method_runs_once(saved, tmp_path, passed_whole, cls, how, around):
    source = saved("llama")
    if cls is Mixed:
        source = tmp_path / "source"
        hf_stream.convert(saved("llama"), source, layout=RENAMED)
    with ExitStack() as stack:
        if around == "enabled":
            hf_stream.enable()
        elif around == "streaming":
            stack.enter_context(hf_stream.streaming())
        if how == "methods":
            model = cls.from_pretrained(source)
            model.save_pretrained(tmp_path / "ours")
        else:
            loaded = cls
            if how == "auto":
                loaded = type("AutoModel", (hf_stream.AutoModel,), {"_model_mapping": {transformers.LlamaConfig: cls}})
            model = hf_stream.from_pretrained(loaded, source)
            hf_stream.save_pretrained(model, tmp_path / "ours")
    assert model.calls == ["load", "save"]
    assert type(model) is cls
    assert not hf_stream.verify(tmp_path / "ours", source)
    # A class of transformers streams by its own methods only if that is switched on.
    assert (passed_whole == []) is not (cls is Overriding and how == "methods" and around == "nothing")


def test_a_layout_of_a_block_leads_in_and_back_out(saved, tmp_path, passed_whole):
    hf_stream.convert(saved("llama"), tmp_path / "renamed", layout=RENAMED)
    with hf_stream.streaming(RENAMED.inverse):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "renamed")
        model.save_pretrained(tmp_path / "back")
        model.save_pretrained(tmp_path / "held", save_original_format=False)
        hf_stream.save_pretrained(model, tmp_path / "own")
    assert passed_whole == []
    assert contents(tmp_path / "back") == contents(tmp_path / "renamed")
    for target in ("held", "own"):
        assert not hf_stream.verify(tmp_path / target, saved("llama"))


def test_of_nested_blocks_the_innermost_counts_and_an_error_undoes_all(saved, tmp_path):
    hf_stream.convert(saved("llama"), tmp_path / "renamed", layout=RENAMED)
    before = hooks()
    with hf_stream.streaming(RENAMED.inverse):
        inside = hooks()
        with hf_stream.streaming():
            assert hooks() == inside
            loads_and_saves(saved("llama"), tmp_path / "inner")
        assert hooks() == inside != before
        loads_and_saves(tmp_path / "renamed", tmp_path / "outer")
        with pytest.raises(OSError, match="no-such-model"), hf_stream.streaming():
            transformers.AutoModel.from_pretrained(tmp_path / "no-such-model", local_files_only=True)
        assert hooks() == inside
    assert hooks() == before
    assert contents(tmp_path / "inner") == contents(saved("llama"))
    assert contents(tmp_path / "outer") == contents(tmp_path / "renamed")


@given(st.lists(st.sampled_from(["enable", "disable", "enter", "leave"]), max_size=12))
@settings(deadline=None)
def test_hooks_are_there_as_long_as_anyone_wants_them(steps):
    before, enabled, blocks = hooks(), False, []
    for step in steps:
        if step == "enable":
            hf_stream.enable()
            enabled = True
        elif step == "disable":
            hf_stream.disable()
            enabled = False
        elif step == "enter":
            blocks.append(hf_stream.streaming())
            blocks[-1].__enter__()
        elif blocks:
            blocks.pop().__exit__(None, None, None)
        assert (hooks() != before) is (enabled or bool(blocks))
    hf_stream.disable()
    while blocks:
        blocks.pop().__exit__(None, None, None)
    assert all(now is was for now, was in zip(hooks(), before, strict=True))


def in_thread(function, *args) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function, *args).result()


def test_enable_holds_for_every_thread_and_a_block_for_its_own(saved, tmp_path, passed_whole):
    with hf_stream.streaming():
        in_thread(loads_and_saves, saved("llama"), tmp_path / "plain")
        assert passed_whole
        passed_whole.clear()
        in_thread(contextvars.copy_context().run, loads_and_saves, saved("llama"), tmp_path / "copied")
        assert passed_whole == []
    hf_stream.enable()
    in_thread(loads_and_saves, saved("llama"), tmp_path / "streamed")
    in_thread(hf_stream.disable)
    assert passed_whole == []
    loads_and_saves(saved("llama"), tmp_path / "after")
    assert passed_whole
    assert len({tuple(contents(path).items()) for path in tmp_path.iterdir()}) == 1


def test_threads_that_switch_on_and_off_at_once_leave_nothing_behind():
    def work(number):
        for _ in range(200):
            if number % 2:
                hf_stream.enable()
                hf_stream.disable()
            else:
                with hf_stream.streaming():
                    pass

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    before = hooks()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hooks() == before


def test_a_block_holds_for_its_own_asynchronous_task(saved, tmp_path, passed_whole):
    seen = {}

    async def streams(entered, done):
        with hf_stream.streaming():
            entered.set()
            await done.wait()
            loads_and_saves(saved("llama"), tmp_path / "streamed")
            seen["streams"] = len(passed_whole)

    async def plain(entered, done):
        await entered.wait()
        loads_and_saves(saved("llama"), tmp_path / "plain")
        seen["plain"] = len(passed_whole)
        passed_whole.clear()
        done.set()

    async def both():
        entered, done = asyncio.Event(), asyncio.Event()
        await asyncio.gather(streams(entered, done), plain(entered, done))

    asyncio.run(both())
    assert seen["plain"] > 0
    assert seen["streams"] == 0


def test_a_hook_that_another_library_wraps_meanwhile_goes_on_working(saved, tmp_path, passed_whole, monkeypatch):
    calls = []
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", transformers.PreTrainedModel.save_pretrained)

    def wrap():
        inner = transformers.PreTrainedModel.save_pretrained

        def outer(self, *args, **kwargs):
            calls.append("outer")
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", outer)

    with hf_stream.streaming():
        wrap()
        loads_and_saves(saved("llama"), tmp_path / "inside")
    assert passed_whole == []
    loads_and_saves(saved("llama"), tmp_path / "after")
    assert passed_whole
    passed_whole.clear()
    with hf_stream.streaming():
        loads_and_saves(saved("llama"), tmp_path / "again")
    assert passed_whole == []
    assert calls == ["outer"] * 3
    assert len({tuple(contents(path).items()) for path in tmp_path.iterdir()}) == 1


def test_enable_after_transformers_and_its_classes_have_been_imported(saved, tmp_path):
    program = """
import sys
from transformers import AutoModelForCausalLM, modeling_utils
def refuse(*args, **kwargs):
    raise AssertionError("not streamed")
modeling_utils.safe_open = modeling_utils.safe_save_file = refuse
import hf_stream
hf_stream.enable(buffer_size=1 << 20, progress=False)
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32").save_pretrained(sys.argv[2])
hf_stream.disable()
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
except AssertionError:
    sys.exit(0)
sys.exit("still streaming")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, saved("llama"), tmp_path], check=True)
    assert not hf_stream.verify(saved("llama"), tmp_path)
