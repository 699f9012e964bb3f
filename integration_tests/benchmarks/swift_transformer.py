"""OPT in 8 parts of metaseq to the partitions of SwiftTransformer, in float16.

    python integration_tests/benchmarks/swift_transformer.py --converter SwiftTransformer/scripts/converter.py

Contenders: hf_stream.convert, with and without verify; SwiftTransformer's own converter, if its path is given (a clone
of github.com/LLMServe/SwiftTransformer has it); and, as the bound for moving the bytes, cp -r.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

import harness
import torch
from harness import Case, Contender, Work
from save import with_cp

# Workers are other processes, and inherit it.
CONVERTER = "HF_STREAM_BENCHMARK_CONVERTER"
PARTS = "reshard-model_part-*.pt"


def with_hf_stream(source: Path, target: Path) -> Work:
    """Convert with hf_stream."""
    import hf_stream
    from hf_stream.layouts import swift_transformer

    def work() -> Path:
        hf_stream.convert(source / PARTS, target, layout=swift_transformer(), dtype=torch.float16)
        return target

    return work


def with_verify(source: Path, target: Path) -> Work:
    """Convert with hf_stream, and compare both sides afterwards."""
    import hf_stream
    from hf_stream.layouts import swift_transformer

    def work() -> Path:
        hf_stream.convert(source / PARTS, target, layout=swift_transformer(), dtype=torch.float16, verify=True)
        return target

    return work


def with_converter(source: Path, target: Path) -> Work:
    """Convert with SwiftTransformer's program, as its command line does it."""
    program = Path(os.environ[CONVERTER])
    sys.path.insert(0, str(program.parent))
    arguments = ["--input", str(source / PARTS), "--output", str(target), "--dtype", "fp16", "--model", "opt"]

    def work() -> Path:
        sys.argv[1:] = arguments
        runpy.run_path(str(program), run_name="__main__")
        return target

    return work


def main() -> None:
    """Take the converter's path from the command line, and leave the rest to the harness."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--converter", type=Path)
    own, sys.argv[1:] = parser.parse_known_args()
    if own.converter is not None:
        os.environ[CONVERTER] = str(own.converter.resolve())
    contenders = {"hf_stream": Contender(with_hf_stream), "hf_stream, verify": Contender(with_verify)}
    if CONVERTER in os.environ:
        contenders["converter"] = Contender(with_converter)
    contenders["cp"] = Contender(with_cp, same_result=False)
    case = Case("Convert OPT in parts to SwiftTransformer's partitions", "metaseq-opt", contenders, ["converter", "cp"])
    harness.main({"opt": case})


if __name__ == "__main__":
    main()
