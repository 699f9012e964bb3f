"""`push_to_hub` of a save: transformers' own upload of what a save has put into a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.hub import create_and_tag_model_card, hf_api


@contextmanager
def pushed(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    token: str | bool | None = None,
    repo_id: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    **repo_options: Any,
) -> Iterator[None]:
    """Run a block that saves into `directory`, and then push what it has put there, as transformers does.

    The repository is made, if need be, before the block runs: who may not write to it learns that at once.

    Args:
        model: Whose tags the model card gets.
        directory: Where the block saves; files that it leaves alone are not pushed.
        token: As in transformers, like all further arguments.
    """
    if token is not None:
        repo_options["token"] = token
    if repo_id is None:
        repo_id = os.fspath(directory).split(os.path.sep)[-1]
    repo_id = hf_api().create_repo(repo_id, exist_ok=True, **repo_options).repo_id
    before = model._get_files_timestamps(directory) if os.path.isdir(directory) else {}
    yield
    card = create_and_tag_model_card(repo_id, model.model_tags, token=token)  # type: ignore[arg-type]
    card.save(os.path.join(directory, "README.md"))
    model._upload_modified_files(
        directory, repo_id, before, commit_message=commit_message, token=token, create_pr=create_pr
    )
