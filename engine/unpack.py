"""`python -m kvbench.engine.unpack FILE.gguf FOLDER DTYPE`: a GGUF and its tokenizer as safetensors, all or nothing."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path


def unpack(file: Path, folder: Path, dtype: str) -> None:
    """Dequantise `file` through transformers into `folder`, as plain weights of `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvbench.engine.weights import quiet

    quiet()
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        made = Path(aside) / "model"
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype.removeprefix("torch."))
        )
        vars(model)["hf_quantizer"] = None  # the weights are plain numbers now
        del model.config.quantization_config
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
        if not folder.exists():
            shutil.move(made, folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
