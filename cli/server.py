"""The server of `--target`: found, tried with a first request, and described, before anything else is spent on it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kvbench.cli.config import SweepConfig
from kvbench.engine.types import Request
from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from kvbench.engine.weights import Source
    from kvbench.workloads.endpoint import Decode, Endpoint


COLD_S = 30.0
"""A first answer has this time at least, whatever --request-timeout says: no other request waits for a cold server."""


def reach(config: SweepConfig, target: str, source: Source, tokenizer: Any, first: Request) -> Endpoint:
    """The server at `target`, which has answered the beginning of `first`."""
    from kvbench.workloads.connect import FIRST_S, connect

    decode = _decoder(source, tokenizer)
    if config.endpoint_type == "chat" and decode is None:
        raise KvbenchError(f"a chat goes as text, and {source.name} has no tokenizer here; give --model a folder")
    patience_s = min(FIRST_S, max(COLD_S, config.request_timeout_s or FIRST_S))
    found = connect(
        target, config.endpoint_type, first, model=config.served_model, decode=decode, patience_s=patience_s
    )
    if config.turns > 1 and not found.tells_ids:
        raise KvbenchError(
            f"--turns goes on from the tokens of each answer, and the server at {found.url} does not tell them; drop it"
        )
    return found


def _decoder(source: Source, tokenizer: Any) -> Decode | None:
    """From token ids to text, by the model's tokenizer, loaded when first needed; None for a bare shape."""
    from kvbench.engine.weights import load_tokenizer

    if tokenizer is None and source.folder is None:
        return None
    loaded = cache(lambda: tokenizer or load_tokenizer(source))

    def decode(ids: tuple[int, ...]) -> str:
        if (known := loaded()) is None:
            raise KvbenchError(f"{source.name} has no tokenizer to turn its prompts into text; add its files to it")
        return str(known.decode(list(ids), skip_special_tokens=True))

    return decode


def described(endpoint: Endpoint) -> str:
    """`http://127.0.0.1:8000 serves smollm2 by completions (vllm 0.32.0); prompts as token ids, usage asked for`."""
    made = " ".join(filter(None, (endpoint.software, endpoint.version)))
    counters = "" if endpoint.counts else "; it has no counters that are known here"
    serves = f"{endpoint.url} serves {endpoint.model} by {endpoint.kind}{f' ({made})' if made else ''}"
    return f"{serves}; {endpoint.way}{counters}"
