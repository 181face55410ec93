"""Turns a GGUF file into a normal Hugging Face directory. Imports torch: run it as a
process of its own, `python -m services.models.convert GGUF OUTPUT`.

The weights are de-quantized to float32 and saved as safetensors, with config,
generation config, tokenizer and chat template. Prints one line per step.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, output: Path) -> None:
    """Writes the model of `gguf` into the directory `output`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("    reading and de-quantizing the weights", flush=True)
    source = {"gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), dtype=torch.float32, **source
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    config = quantized.config
    # What was de-quantized is not quantized any more: a fresh model of the same class,
    # from a config that does not say so, saves as an ordinary checkpoint.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    print("    writing safetensors and tokenizer", flush=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    for path in output.iterdir():
        # safetensors are written for the owner alone; a service may run as another user.
        path.chmod(0o644)


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m services.models.convert GGUF OUTPUT", file=sys.stderr)
        return 2
    convert(Path(argv[0]), Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
