"""`miles convert`: a checkpoint of a run, or a GGUF file, becomes a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from miles.checkpoint.convert import convert_adapter, convert_checkpoint
from miles.checkpoint.gguf import convert_gguf
from miles.errors import ConfigError


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="miles convert", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input-dir", required=True, type=Path, help="iter_... checkpoint, PEFT adapter or GGUF file")
    parser.add_argument("--output-dir", required=True, type=Path, help="the Hugging Face folder to write")
    parser.add_argument("--origin-hf-dir", type=Path, help="model folder to take config and tokenizer from")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of the weights (default: that of the config)"
    )
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: write the PEFT adapter, unmerged")
    arguments = parser.parse_args(argv)
    source: Path = arguments.input_dir
    if not source.exists():
        raise ConfigError(f"--input-dir {source} does not exist; expected a checkpoint folder or a GGUF file")
    if source.suffix == ".gguf":
        convert_gguf(source, arguments.output_dir)
    elif arguments.adapter:
        convert_adapter(source, arguments.output_dir)
    else:
        convert_checkpoint(source, arguments.output_dir, origin=arguments.origin_hf_dir, dtype=arguments.dtype)
    print(f"wrote {arguments.output_dir}")
    return 0
