"""What `save_pretrained(..., push_to_hub=True)` puts on the Hub is what plain transformers puts there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hub_server import HubServer

CHILD = Path(__file__).with_name("pushes.py")


def run(hub: HubServer, tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(CHILD), name, str(tmp_path / "saved")]
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    child = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr


def test_files_and_commits_on_the_hub_equal_plain_transformers(hub: HubServer, tmp_path: Path) -> None:
    run(hub, tmp_path, "twice")
    for name in ("llama", "qwen3_moe"):
        plain, ours = hub.repos[f"tester/plain-{name}"], hub.repos[f"tester/ours-{name}"]
        assert plain.private
        assert ours.private
        for revision in ("main", "refs/pr/1"):
            expected = hub.files(f"tester/plain-{name}", revision)
            pushed = hub.files(f"tester/ours-{name}", revision)
            assert pushed == expected
            assert "notes.txt" not in pushed
            assert "README.md" in pushed
        assert list(ours.refs) == list(plain.refs) == ["main", "refs/pr/1"]
        for revision in ours.refs:
            pushes = hub.commits(f"tester/plain-{name}", revision)
            assert [c.title for c in hub.commits(f"tester/ours-{name}", revision)] == [c.title for c in pushes]
        assert pushes[-1].title == "changed"


def test_names_layouts_adapters_methods_and_tokens(hub: HubServer, tmp_path: Path) -> None:
    run(hub, tmp_path, "others")
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert hub.files("tester/my-model").keys() == names

    renamed = hub.files("tester/renamed")["model.safetensors"]
    assert renamed == (tmp_path / "saved/renamed/model.safetensors").read_bytes()
    assert b'"inner.norm.weight"' in renamed

    plain, ours = (hub.files(f"tester/{kind}-branch", "dev") for kind in ("plain", "ours"))
    assert b"- small" in ours["README.md"]
    assert {**plain, "config.json": b""} == {**ours, "config.json": b""}
    assert hub.files("tester/ours-branch") == {}

    assert "tester/refused" not in hub.repos
    adapter = {"README.md", "adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
    assert hub.files("tester/my-adapter").keys() == adapter
