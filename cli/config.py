"""What a sweep was told: every flag as a checked value. No heavy library; wrong input ends here, before any work."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.metrics.slo import DEFAULT_SLOS, Slo, parse_slos
from kvbench.workloads.grid import Context, LoadPoint, Variant, parse_floats, parse_ints

DATASETS = ("random", "support", "jsonl")
DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("table", "markdown", "csv", "json")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}ib": 1024**_power, _letter: 1024**_power, f"{_letter}b": 1000**_power}


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """The flags of `kvbench sweep`. None: not told; the sweep chooses and says why."""

    variants: tuple[Variant, ...]
    loads: tuple[LoadPoint, ...] | None
    contexts: tuple[Context, ...] | None
    model: str | None = None
    weights: str = "auto"
    dtype: str | None = None
    device: str | None = None
    kv_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    block_size: int = 16
    prefix_caching: bool = False
    cache_salts: tuple[str, ...] = ("",)
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    max_tokens: int | None = None
    overflow: str = "reject"
    arrivals: str = "poisson"
    burstiness: float = 1.0
    range_ratio: float | None = None
    prefix_tokens: int = 0
    dataset: str = "random"
    dataset_path: Path | None = None
    prompts: int | None = None
    warmups: int = 4
    repeats: int | None = None
    seed: int = 0
    slos: tuple[Slo, ...] = DEFAULT_SLOS
    temperature: float = 0.0
    ignore_eos: bool | None = None
    price_usd_per_hour: float | None = None
    save_tokens: bool = False
    metadata: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        whole: tuple[tuple[str, int | None], ...] = (
            ("--max-model-len", self.max_model_len),
            ("--block-size", self.block_size),
            ("--max-num-batched-tokens", self.max_batched_tokens),
            ("--max-num-seqs", self.max_sequences),
            ("--max-tokens", self.max_tokens),
            ("--num-prompts", self.prompts),
            ("--repeats", self.repeats),
        )
        for flag, count in whole:
            if count is not None and count < 1:
                raise KvbenchError(f"{flag} must be at least 1, not {count}")
        for flag, least, value in (
            ("--prefix-len", 0, self.prefix_tokens),
            ("--num-warmups", 0, self.warmups),
            ("--seed", 0, self.seed),
            ("--temperature", 0, self.temperature),
            ("--price", 0, self.price_usd_per_hour),
        ):
            if value is not None and not least <= value < math.inf:
                raise KvbenchError(f"{flag} must be a number of at least {least}, not {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise KvbenchError(
                f"--gpu-memory-utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if self.range_ratio is not None and not 0 <= self.range_ratio < 1:
            raise KvbenchError(f"--range-ratio must be at least 0 and below 1, not {self.range_ratio}")
        self._check_dataset()
        if self.cache_salts != ("",) and not self.prefix_caching:
            raise KvbenchError("--cache-salt keeps cached prefixes apart; it needs --enable-prefix-caching")
        future = [variant.reserve for variant in self.variants if variant.reserve in ("pow2", "oracle")]
        if future and (self.ignore_eos is False or (self.ignore_eos is None and self.dataset == "jsonl")):
            raise KvbenchError(
                f"--reserve {future[0]} must know each answer's length beforehand; it needs --ignore-eos"
            )

    def _check_dataset(self) -> None:
        if (self.dataset == "jsonl") != (self.dataset_path is not None):
            raise KvbenchError("--dataset jsonl and --dataset-path FILE go together; give both or neither")
        if self.prefix_tokens and self.dataset != "random":
            raise KvbenchError(f"--dataset {self.dataset} has prompts of its own; --prefix-len is for --dataset random")
        lengths = self.contexts or ()
        if self.dataset == "support" and (lengths or self.range_ratio is not None):
            raise KvbenchError(
                "--dataset support has lengths of its own; drop --input-len, --output-len, --range-ratio"
            )
        if self.dataset == "jsonl" and (self.range_ratio or any(c.input_tokens for c in lengths)):
            raise KvbenchError("--dataset jsonl has prompts of its own; drop --input-len and --range-ratio")

    def facts(self) -> dict[str, object]:
        """As `run.json` keeps it: strict JSON values."""
        kept = asdict(self)
        kept["slos"] = [str(slo) for slo in self.slos]
        kept["dataset_path"] = None if self.dataset_path is None else str(self.dataset_path)
        kept["metadata"] = dict(self.metadata)
        return kept


def choice(value: str, allowed: Iterable[str], flag: str) -> str:
    """`value` if it is one of `allowed`, in any case; else KvbenchError with the nearest."""
    names = list(allowed)
    if value.lower() in names:
        return value.lower()
    near = difflib.get_close_matches(value.lower(), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise KvbenchError(f"{flag} {value!r} is not one of {', '.join(names)}{hint}")


def parse_dtype(value: str | None) -> str | None:
    """`auto`, a torch name or its short form; None for auto."""
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
    if value is None or value.lower() == "auto":
        return None
    return choice(short.get(value.lower(), value), DTYPES, "--dtype")


def parse_bytes(text: str, flag: str) -> int:
    """`4GiB`, `500MB`, `1048576`; one letter counts in powers of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise KvbenchError(f"{flag} cannot read {text!r}; write a size such as 512MiB or 4GiB")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if not 1 <= size < 2**60:
        raise KvbenchError(f"{flag} must be a size above 0, not {text!r}")
    return int(size)


def parse_variants(backends: str, reserves: str, known: Iterable[str], policies: Iterable[str]) -> tuple[Variant, ...]:
    """`--backend` and `--reserve` as rows of the comparison; a policy belongs to the contiguous backend alone."""
    names = [choice(item.strip(), known, "--backend") for item in backends.split(",")]
    rules = [choice(item.strip(), policies, "--reserve") for item in reserves.split(",")]
    found = [
        Variant(name, rule)
        for name in dict.fromkeys(names)
        for rule in (dict.fromkeys(rules) if name == "contiguous" else (None,))
    ]
    return tuple(found)


def parse_loads(concurrency: str | None, request_rate: str | None) -> tuple[LoadPoint, ...] | None:
    """`--concurrency` or `--request-rate` as points of the grid; None where neither is given."""
    if concurrency and request_rate:
        raise KvbenchError("--concurrency and --request-rate are two different loads; give one of them")
    if request_rate:
        return tuple(LoadPoint(request_rate=rate) for rate in parse_floats(request_rate, "--request-rate"))
    if concurrency:
        return tuple(LoadPoint(concurrency=users) for users in parse_ints(concurrency, "--concurrency"))
    return None


def parse_contexts(inputs: str | None, outputs: str | None) -> tuple[Context, ...] | None:
    """Every input length with every output length; None where neither is given."""
    if inputs is None and outputs is None:
        return None
    ins = parse_ints(inputs, "--input-len") if inputs else [None]
    outs = parse_ints(outputs, "--output-len") if outputs else [None]
    return tuple(Context(i, o) for i in ins for o in outs)


def parse_salts(text: str | None) -> tuple[str, ...]:
    """`--cache-salt`: one, or several that the requests take in turns; the empty one where it is not given."""
    return ("",) if text is None else tuple(text.split(","))


def parse_metadata(items: Iterable[str]) -> tuple[tuple[str, str], ...]:
    pairs = [item.partition("=") for item in items]
    for key, mark, _ in pairs:
        if not key or not mark:
            raise KvbenchError(f"--metadata takes key=value, not {key!r}")
    return tuple((key, value) for key, _, value in pairs)


def parse_objectives(slo: Iterable[str], goodput: str | None) -> tuple[Slo, ...]:
    """`--slo` (repeatable) and its alias `--goodput`; the defaults where neither is given."""
    return parse_slos([*slo, *([goodput] if goodput else [])]) or DEFAULT_SLOS
