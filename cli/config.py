"""What a sweep was told: every flag as a checked value. No heavy library; wrong input ends here, before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvbench.cli.load_config import LoadConfig
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint, Variant
from kvbench.metrics.precision import FEWEST_REPEATS
from kvbench.metrics.slo import DEFAULT_SLOS, Slo, parse_slos
from kvbench.workloads.endpoint import PATHS, base_url
from kvbench.workloads.options import LARGEST

MOST_REPEATS = 1000
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8")
PATHS_OF_FILES = ("dataset_path", "gpu_file")
SIM = "sim:"
"""How the name of a device begins that is simulated."""
FORMATS = ("table", "markdown", "csv", "json")

FLAGS = {
    "variants": "--backend, --reserve, --batching, --prefix-caching and --preemption",
    "loads": "--concurrency or --request-rate",
    "find": "--find-max-rate or --find-max-concurrency",
    "contexts": "--input-len, --output-len, --prefix-len and --n",
    "kv_bytes": "--kv-memory",
    "swap_bytes": "--swap-space",
    "cache_salts": "--cache-salt",
    "max_batched_tokens": "--max-num-batched-tokens",
    "max_sequences": "--max-num-seqs",
    "prompts": "--num-prompts",
    "warmups": "--num-warmups",
    "slos": "--slo",
    "price_usd_per_hour": "--price",
    "request_timeout_s": "--request-timeout",
    "served_model": "--served-model-name",
    "cell_timeout_s": "--cell-timeout",
    "think_s": "--think-time",
    "duration_s": "--duration",
}
"""The flags of fields whose names are not theirs."""

NOUNS: dict[str, type[Variant | LoadPoint | Context]] = {
    "variants": Variant,
    "loads": LoadPoint,
    "contexts": Context,
}
"""The fields that are lists of points of the grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(LoadConfig):
    """The flags of `kvbench sweep`. None: not told; the sweep chooses and says why."""

    variants: tuple[Variant, ...]
    model: str | None = None
    weights: str = "auto"
    dtype: str | None = None
    device: str | None = None
    tp: int = 1
    kv_dtype: str = "auto"
    attention: str = "auto"
    gpu_file: Path | None = None
    kv_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    block_size: int = 16
    swap_bytes: int | None = None
    cache_salts: tuple[str, ...] = ("",)
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    max_tokens: int | None = None
    overflow: str = "reject"
    warmups: int = 4
    repeats: int | None = None
    until_ci: float | None = None
    find: str | None = None
    slos: tuple[Slo, ...] = DEFAULT_SLOS
    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    ignore_eos: bool | None = None
    request_timeout_s: float | None = None
    cell_timeout_s: float | None = None
    price_usd_per_hour: float | None = None
    save_tokens: bool = False
    metadata: tuple[tuple[str, str], ...] = ()
    target: str | None = None
    endpoint_type: str = "completions"
    served_model: str | None = None

    def __post_init__(self) -> None:
        LoadConfig.__post_init__(self)
        whole: tuple[tuple[str, int | None], ...] = (
            ("--max-model-len", self.max_model_len),
            ("--block-size", self.block_size),
            ("--max-num-batched-tokens", self.max_batched_tokens),
            ("--max-num-seqs", self.max_sequences),
            ("--max-tokens", self.max_tokens),
            ("--repeats", self.repeats),
            ("--tp", self.tp),
        )
        for flag, count in whole:
            if count is not None and not 1 <= count <= LARGEST:
                raise KvbenchError(f"{flag} must be at least 1 and at most {LARGEST:,}, not {count}")
        for flag, least, value in (
            ("--num-warmups", 0, self.warmups),
            ("--temperature", 0, self.temperature),
            ("--price", 0, self.price_usd_per_hour),
        ):
            if value is not None and not least <= value <= LARGEST:
                raise KvbenchError(f"{flag} must be at least {least} and at most {LARGEST:,}, not {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise KvbenchError(
                f"--gpu-memory-utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if not 0 < self.top_p <= 1:
            raise KvbenchError(f"--top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise KvbenchError(f"--repetition-penalty must be from 0.01 to 100, not {self.repetition_penalty}")
        self._check_variants()
        self._check_samples()
        self._check_target()
        self._check_device()
        if self.repeats is not None and self.repeats > MOST_REPEATS:
            raise KvbenchError(f"--repeats must be at most {MOST_REPEATS:,}, not {self.repeats}")
        if self.find is not None:
            self._check_search()
        if self.until_ci is not None and self.repeats is not None and self.repeats < FEWEST_REPEATS:
            raise KvbenchError(
                f"--until-ci needs at least {FEWEST_REPEATS} repeats to be honest, and --repeats {self.repeats} allows "
                f"no more; raise it to {FEWEST_REPEATS} or drop one of them"
            )

    def _check_search(self) -> None:
        flag = f"--find-max-{self.find}"
        if self.repeats is not None or self.until_ci is not None:
            raise KvbenchError(f"{flag} chooses by itself how often a load runs; drop --repeats and --until-ci")
        rates = self.find == "rate"
        if self.loads is None or len(self.loads) != 1 or (self.loads[0].request_rate is not None) != rates:
            start = "--request-rate" if rates else "--concurrency"
            raise KvbenchError(f"{flag} begins at one load; give it as {start} N or leave it open")

    def _check_variants(self) -> None:
        if self.cache_salts != ("",) and not any(variant.prefix_caching for variant in self.variants):
            raise KvbenchError("--cache-salt keeps cached prefixes apart; it needs --prefix-caching on")
        if self.swap_bytes is not None and not any(variant.preemption == "swap" for variant in self.variants):
            raise KvbenchError("--swap-space is memory for --preemption swap; add that or drop --swap-space")
        future = [variant.reserve for variant in self.variants if variant.reserve in ("pow2", "oracle")]
        if future and (self.ignore_eos is False or (self.ignore_eos is None and self.dataset == "jsonl")):
            raise KvbenchError(
                f"--reserve {future[0]} must know each answer's length beforehand; it needs --ignore-eos"
            )

    def _check_samples(self) -> None:
        most = max((context.samples for context in self.contexts or ()), default=1)
        if most > 1 and not self.temperature:
            raise KvbenchError(
                f"--n {most} at --temperature 0 would give the same answer {most} times; set --temperature above 0"
            )
        for flag, seats in (
            ("--max-num-seqs", self.max_sequences),
            ("--max-num-batched-tokens", self.max_batched_tokens),
        ):
            if most > seats:
                raise KvbenchError(
                    f"--n {most} samples of a request never run together in {flag} {seats}; "
                    f"lower --n or raise {flag} to {most}"
                )

    def _check_target(self) -> None:
        if self.endpoint_type not in PATHS:
            raise KvbenchError(f"--endpoint-type must be one of {', '.join(PATHS)}, not {self.endpoint_type!r}")
        if self.target is None:
            if self.endpoint_type != "completions" or self.served_model is not None:
                raise KvbenchError("--endpoint-type and --served-model-name belong to a server; add --target URL")
            return
        base_url(self.target)
        if self.model is None:
            raise KvbenchError("--target needs --model: the shape and the tokenizer of the model that is served there")

    @property
    def card(self) -> str | None:
        """The name of the card that is simulated; None where the device is one there is."""
        return self.device.removeprefix(SIM) if self.device and self.device.startswith(SIM) else None

    def _check_device(self) -> None:
        """What only a real device can do, and what only a computed one."""
        if self.card is None:
            if self.tp > 1:
                raise KvbenchError(
                    f"--tp {self.tp} shares a model over simulated cards only; add --device {SIM}CARD or drop --tp"
                )
            if self.kv_dtype != KV_DTYPES[0]:
                raise KvbenchError(
                    f"--kv-dtype {self.kv_dtype} is for simulated cards only; add --device {SIM}CARD or drop it"
                )
            if self.gpu_file is not None:
                raise KvbenchError(f"--gpu-file describes cards to simulate; add --device {SIM}CARD or drop it")
            return
        if self.attention != "auto":
            raise KvbenchError(
                f"--attention {self.attention} is how this device computes; drop it or --device {self.device}"
            )
        where = f"--device {self.device} computes how long steps take, not their tokens"
        if self.target is not None:
            raise KvbenchError(
                f"{where}, and --target measures a server: two kinds of evidence do not share a run; drop one of them"
            )
        if self.ignore_eos is False or (self.ignore_eos is None and self.dataset == "jsonl"):
            raise KvbenchError(f"{where}, so no answer can end by itself; add --ignore-eos: each has its drawn length")
        if self.weights != "auto":
            raise KvbenchError(f"{where}, and loads no weights; drop --weights {self.weights}")

    def facts(self) -> dict[str, object]:
        """As `run.json` keeps it: strict JSON values."""
        kept = asdict(self)
        kept["slos"] = [str(slo) for slo in self.slos]
        for name in PATHS_OF_FILES:
            kept[name] = None if kept[name] is None else str(kept[name])
        kept["metadata"] = dict(self.metadata)
        return kept

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> SweepConfig:
        """The configuration that `facts` were made of, read back from `run.json`; what they lack has its default."""
        known: dict[str, Any] = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        for name, kind in NOUNS.items():
            if known[name] is not None:
                known[name] = tuple(kind.of(item) for item in known[name])
        for name in PATHS_OF_FILES:
            known[name] = None if known.get(name) is None else Path(known[name])
        known["cache_salts"] = tuple(known.get("cache_salts", ("",)))
        known["slos"] = parse_slos(known["slos"])
        known["metadata"] = tuple(known["metadata"].items())
        return cls(**known)


def flag(field: str) -> str:
    """The flag or flags that a field of `SweepConfig` comes from."""
    return FLAGS.get(field, f"--{field.replace('_', '-')}")
