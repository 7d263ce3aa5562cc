"""Cards one need not have: the same engine and allocators in the time that they would take, nothing of it measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.asking import SIM_LOADS
from kvbench.cli.config import SIM, SweepConfig
from kvbench.cli.owned import SWAP_BYTES
from kvbench.cli.price import Price
from kvbench.cli.stack import Backend, CacheConfig
from kvbench.engine.clock import VirtualClock
from kvbench.engine.hf_config import load_shape
from kvbench.errors import KvbenchError
from kvbench.metrics.points import LoadPoint
from kvbench.metrics.records import SIMULATED, Run
from kvbench.planner.catalog import find_card, load_cards
from kvbench.planner.intervals import columns_of, shipped_ranges
from kvbench.planner.memory import Memory, Serving, plan_memory
from kvbench.planner.simulator import SimExecutor
from kvbench.planner.steps import step_cost
from kvbench.workloads.grid import Cell

if TYPE_CHECKING:
    from kvbench.engine.interfaces import Allocator, Clock, Executor
    from kvbench.planner.catalog import Card

MODEL = "Llama-3.1-8B"
DTYPES = ("bfloat16", "float16")


_OF_A_CARD: tuple[str, ...] = (
    "id",
    "name",
    "memory_bytes",
    "memory_source",
    "bandwidth_bytes_per_s",
    "link",
    "link_bytes_per_s",
)
_OF_A_CARD += ("tdp_w", "note", "source", "as_of")


class Virtual:
    """Cards of one kind, `tp` of them where they share a model, and the model's shape. It has the members of `Owned`,
    so that a sweep need not know which of the two it runs on."""

    evidence = SIMULATED
    kind = "sim"
    attention = None
    patience_s = math.inf  # how many repeats there are shall not hang on how fast they were computed
    repeats = 3
    load_s = None
    first_forward_s = 0.0
    special_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    loads: tuple[LoadPoint, ...] = SIM_LOADS

    def __init__(self, config: SweepConfig, card: str, choices: dict[str, str]) -> None:
        self._config, self._choices = config, choices
        self.card = find_card(card, () if config.gpu_file is None else load_cards(config.gpu_file))
        if config.model is None:
            choices["model"] = "a common size; --model sets your own"
        self.shape = load_shape((config.model or MODEL).strip())
        self.dtype = config.dtype or _default_dtype(self.card, choices)
        if self.dtype not in (known := [dtype for dtype in DTYPES if dtype in self.card.flops_per_s]):
            raise KvbenchError(f"--dtype {self.dtype} has no rate for {self.card.name}; use {' or '.join(known)}")
        self.tp = config.tp
        kv_dtype = self.dtype if config.kv_dtype == "auto" else config.kv_dtype
        serving = Serving(
            self.dtype,
            kv_dtype,
            self.tp,
            config.gpu_memory_utilization,
            config.max_batched_tokens,
            config.max_sequences,
            config.block_size,
        )
        self.memory: Memory = plan_memory(self.shape, self.card, serving)
        self._check_room(config.kv_bytes)
        self.steps = step_cost(self.card, self.shape, self.dtype, self.tp, kv_itemsize=serving.kv_itemsize)

    @property
    def name(self) -> str:
        return f"{SIM}{self.card.id}"

    @property
    def model_name(self) -> str:
        return self.shape.name

    @property
    def vocabulary(self) -> int:
        return self.shape.vocab

    @property
    def positions(self) -> int:
        return self.shape.max_positions

    @property
    def price(self) -> Price | None:
        """The middle of what the card is offered for, where the catalogue knows."""
        if (seen := self.card.usd_per_hour) is None:
            return None
        low, high = seen
        return Price((low + high) / 2, self.card.price_source, low, high, self.card.price_as_of or None)

    def tokenizer(self) -> Any:
        """That of a model's folder, where there is one; a shape alone has none."""
        folder = Path((self._config.model or MODEL).strip()).expanduser()
        folder = folder.parent if folder.is_file() else folder
        if not folder.is_dir() or not any(folder.glob("tokenizer*")):
            return None
        from kvbench.engine.weights import find_source, load_tokenizer

        return load_tokenizer(find_source(str(folder)))

    def load(self, max_model_len: int) -> None:
        """Nothing is loaded; the lengths are still the model's to bear."""
        if max_model_len > self.positions:
            raise KvbenchError(
                f"requests of up to {max_model_len} tokens are beyond the {self.positions} positions of "
                f"{self.model_name}; lower --max-model-len, or --input-len and --output-len"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one of the cards: each keeps its share of every token."""
        return self.memory.kv_bytes_per_token

    def pool_bytes(self, plan: Sequence[Cell], max_model_len: int) -> int:
        """What weights, activations and the rest leave of a card."""
        memory = self.memory
        _, *taken = memory.terms
        used = sum(term.bytes for term in taken)
        share = f"{memory.serving.gpu_memory_utilization:.0%} of {self.card.memory_bytes / 2**30:.1f} GiB"
        told = f"{share} less {used / 2**30:.1f} GiB of weights and the rest"
        if memory.pool_tokens < 1:
            raise KvbenchError(
                f"{self.model_name} in {self.dtype} leaves no room for a cache on {self._cards()}: {told}; "
                "raise --tp, choose a larger card or a smaller --model"
            )
        self._choices["kv_memory"] = f"{told}; estimated"
        return memory.pool_bytes

    def swap_bytes(self) -> int:
        self._choices["swap_space"] = "as vLLM's default"
        return SWAP_BYTES

    def begin(self, backend: Backend, memory: CacheConfig) -> tuple[Allocator, Executor, Clock]:
        return backend.make_allocator(memory), SimExecutor(self.steps.cost), VirtualClock()

    def footprint(self) -> None:
        """This machine's memory tells nothing of a card's."""

    def telemetry(self) -> None:
        """A card that is computed draws no power and gets no warmer."""

    def others(self) -> str:
        """Nobody uses a card that is computed."""
        return ""

    def release(self) -> None:
        """There is nothing to hand back."""

    def _check_room(self, kv_bytes: int | None) -> None:
        """KvbenchError where the KV memory that the user wants does not fit beside the weights, whatever else."""
        weights = self.memory.term("weights").bytes
        if kv_bytes is not None and weights + kv_bytes > self.card.memory_bytes:
            room = f"{self.card.memory_bytes / 2**30:.1f} GiB of {'each ' if self.tp > 1 else ''}{self.card.name}"
            raise KvbenchError(
                f"--kv-memory of {kv_bytes / 2**30:,.1f} GiB beside {weights / 2**30:,.1f} GiB of weights is beyond "
                f"the {room}; lower it, raise --tp or choose a larger card"
            )

    def _kv(self) -> str:
        kept = self.memory.serving.kv_dtype
        return "" if kept == self.dtype else f"KV in {kept}, "

    def _cards(self) -> str:
        return f"{f'{self.tp} x ' if self.tp > 1 else ''}{self.card.name}"

    def caveats(self, run: Run, numbers: Mapping[str, object]) -> dict[str, object]:
        """What a prediction rests on (`evidence_class`), where its steps go beyond what step times were fitted to
        (`beyond_fit`, blank where they do not), and where 90 % of what would be measured lies."""
        beyond = self.steps.reach.beyond(run.steps)
        return {
            **columns_of(self.steps.kind, bool(beyond), numbers, shipped_ranges()),
            "beyond_fit": "; ".join(beyond),
        }

    def described(self) -> dict[str, str]:
        """The card and the shape, for who starts a sweep."""
        card, price = self.card, self.price
        money = "" if price is None else f", ${price.low:g} to ${price.high:g} an hour"
        scheme = f", {self.shape.quantisation.name} weights" if self.shape.quantisation else ""
        return {
            "device": f"{self._cards()}, simulated: {card.memory_bytes / 2**30:.1f} GiB, "
            f"{card.bandwidth_bytes_per_s / 1e12:.3g} TB/s, {_teraflops(card)}{money}",
            "step times": self.steps.source,
            "model": f"{self.model_name}, {self.shape.parameters / 1e9:.3g} billion parameters, its shape only{scheme}",
            "dtype": f"{self.dtype}, {self._kv()}{self.kv_bytes_per_token:,} bytes of KV a token"
            f"{' on each card' * (self.tp > 1)}",
        }

    def device_facts(self) -> dict[str, Any]:
        """All that times and memory were reckoned from."""
        card = {name: getattr(self.card, name) for name in _OF_A_CARD} | {"flops_per_s": dict(self.card.flops_per_s)}
        step_times = {"source": self.steps.source, **self.steps.facts}
        reckoned = json.dumps([card, step_times], sort_keys=True).encode()
        return {
            "kind": self.kind,
            "name": f"{self._cards()} (simulated)",
            "memory_bytes": self.card.memory_bytes,
            "cards": self.tp,
            "card": card,
            "step_times": step_times,
            "figures": sha256(reckoned).hexdigest()[:12],
        }

    def model_facts(self) -> dict[str, Any]:
        return {
            "name": self.model_name,
            "family": self.shape.family,
            "parameters": self.shape.parameters,
            "weights": "none",
            "weights_bytes": self.memory.term("weights").bytes,
            "dtype": self.dtype,
            "kv_dtype": self.memory.serving.kv_dtype,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "memory": {term.key: {"bytes": term.bytes, "evidence": term.evidence} for term in self.memory.terms},
        }


def _default_dtype(card: Card, choices: dict[str, str]) -> str:
    found = next((dtype for dtype in DTYPES if dtype in card.flops_per_s), None)
    if found is None:
        raise KvbenchError(f"{card.name} has no 16-bit rate in the catalogue; give one in --gpu-file")
    choices["dtype"] = f"this card multiplies {found}" if found == DTYPES[0] else "this card has no bfloat16"
    return found


def _teraflops(card: Card) -> str:
    return ", ".join(f"{rate / 1e12:,.0f} TFLOP/s {dtype}" for dtype, rate in card.flops_per_s.items())
