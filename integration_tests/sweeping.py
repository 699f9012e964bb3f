"""A process that takes model types from its input and says of each, on a line of its output, how it fared.

`python sweeping.py FOLDER`, which works in FOLDER. Lines out are JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from architectures import primary_class, random_model, small_config
from round_trips import PlainFailureError, differences, has_converters, wasted_reads


def fare(model_type: str, folder: Path) -> dict[str, object]:
    """How a model type fares: whether plain transformers builds and reloads it, and what we do differently."""
    try:
        cls = primary_class(model_type)
        if cls is None:
            return {"left_out": "transformers has no model class for it"}
        model = random_model(cls, small_config(model_type, cls))
    except Exception as error:  # noqa: BLE001 - transformers' own, of whatever kind
        return {"left_out": f"plain transformers does not build it: {type(error).__name__}: {error}"}
    found: list[str] = []
    outcome: dict[str, object] = {"class": cls.__name__, "converts": has_converters(model), "differences": found}
    try:
        found.extend(differences(model, folder))
    except PlainFailureError as reason:
        outcome["unusable"] = str(reason)
    except Exception as error:  # noqa: BLE001 - ours, to be reported
        found.append(f"hf_stream raises {type(error).__name__}: {error}")
    if outcome["converts"] and "unusable" not in outcome:
        try:
            outcome["wasted"] = list(wasted_reads(model, folder / "single"))
        except Exception as error:  # noqa: BLE001 - likewise
            outcome["wasted"] = [f"{type(error).__name__}: {error}"]
    return outcome


def main() -> None:
    """Answer line by line until the input ends."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    # Whatever models print goes elsewhere.
    os.dup2(2, 1)
    for line in sys.stdin:
        model_type = line.strip()
        start = time.process_time()
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
            outcome = fare(model_type, Path(folder))
        outcome |= {"type": model_type, "seconds": round(time.process_time() - start, 2)}
        out.write(json.dumps(outcome) + "\n")
        out.flush()
        gc.collect()


if __name__ == "__main__":
    main()
