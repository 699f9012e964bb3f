"""Log lines of a save name the directory that the user gave, as those of plain transformers do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainings import llama, trainer

import hf_stream
from hf_stream.integrations.transformers.log_names import logged_as


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Of transformers and of hf_stream, at level INFO."""
    handler = Lines()
    loggers = [logging.getLogger(name) for name in ("transformers", "hf_stream")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler.lines
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("given", ["out", "./out", "inner/out/", Path("out")])
@pytest.mark.parametrize("arguments", [{}, {"max_shard_size": "12KB", "variant": "fp16"}], ids=["single", "shards"])
def test_lines_are_those_of_plain_transformers(
    random_model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    given: Any,
    arguments: dict[str, Any],
) -> None:
    model = random_model("llama")
    lines.clear()
    logged = {}
    for who, save in (("plain", type(model).save_pretrained), ("ours", hf_stream.save_pretrained)):
        (tmp_path / who).mkdir()
        monkeypatch.chdir(tmp_path / who)
        for _ in "new", "replaced":
            save(model, given, **arguments)
        logged[who] = lines[:]
        lines.clear()
    assert logged["plain"] == logged["ours"]
    assert sum("saved in" in line or "located at" in line for line in logged["ours"]) >= 4


def test_lines_of_a_training_name_its_checkpoints(tmp_path: Path, lines: list[str]) -> None:
    logged = {}
    for who, callbacks in (("plain", []), ("ours", [hf_stream.StreamingCheckpointCallback()])):
        trainer(llama(), tmp_path / who, *callbacks).train()
        logged[who] = [line.replace(f"/{who}/", "/") for line in lines if "checkpoint-" in line]
        lines.clear()
    assert logged["plain"] == logged["ours"]
    assert any("Saving model checkpoint to" in line for line in logged["ours"])


@pytest.mark.parametrize("call", ["info", "warning", "exception"])
def test_paths_in_arguments_are_renamed_and_everything_else_is_left_alone(lines: list[str], call: str) -> None:
    logger = logging.getLogger("transformers.of_a_test")
    log: Callable[..., None] = getattr(logger, call)
    with logged_as("/top/.out.growing", "given"), logged_as(Path("/top/.out.growing/x/.files"), "/top/.out.growing/x"):
        log("%s has %d of %r, %s", Path("/top/.out.growing/x/.files/model"), 3, [1], "/top/.other")
        log("in /top/.out.growing/x/.files: 100%%")
        log("%(path)s", {"path": "nothing"})
    log("/top/.out.growing/x/.files")
    assert [line.split(" ", 1)[1] for line in lines] == [
        "given/x/model has 3 of [1], /top/.other",
        "in given/x: 100%%",
        "nothing",
        "/top/.out.growing/x/.files",
    ]


def test_other_threads_and_later_lines_are_as_they_were(tmp_path: Path) -> None:
    plain = logging.getLogRecordFactory()
    with logged_as(tmp_path, "given"):
        assert logging.getLogRecordFactory() is not plain
    assert logging.getLogRecordFactory() is plain


@pytest.mark.parametrize("there", [False, True])
def test_other_processes_find_the_directory_that_plain_transformers_makes_for_them(tmp_path: Path, there: bool) -> None:
    model = llama()
    for who, save in (("plain", type(model).save_pretrained), ("ours", hf_stream.save_pretrained)):
        directory = tmp_path / who / "inner"
        if there:
            directory.mkdir(parents=True)
        save(model, directory, is_main_process=False)
        assert directory.is_dir()
        assert not any(directory.iterdir())
        assert [path.name for path in directory.parent.iterdir()] == ["inner"]
        save(model, directory)
        assert torch.equal(
            transformers.AutoModel.from_pretrained(directory).embed_tokens.weight, model.model.embed_tokens.weight
        )


def test_a_directory_that_cannot_be_made_for_other_processes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=f"'{path}' cannot be made"):
            hf_stream.save_pretrained(llama(), path, is_main_process=False)
