"""What a server streams as an answer, chunk by chunk, and the records that come of it.

How many tokens an answer has is what the server's usage says; when they came is what the stream shows. A chunk with
several tokens gives them all its own time. Which chunk has how many is told by token ids in the stream (vLLM's
`return_token_ids`), else by usage in every chunk (`continuous_usage_stats`), else shared out by the length of their
texts. Without any usage a chunk of text counts as one token. What stream and usage say is kept side by side.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvbench.engine.types import Request
from kvbench.metrics.records import FAILED, FINISHED, UNFINISHED, RequestRecord
from kvbench.workloads.faults import CUT, EMPTY, ERROR, MALFORMED, Fault
from kvbench.workloads.lengths import LONGEST

DONE = b"[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
_BROKEN = ("abort", "error")
"""Finish reasons with which a server gives an answer up."""


@dataclass(slots=True)
class _Piece:
    """A chunk that brought tokens: `tokens` of them where the stream says so, else to be shared out by `length`."""

    at_s: float
    sample: int
    tokens: int | None
    length: int


@dataclass(slots=True)
class Answer:
    """The answer to one request while it comes. `sent_s`: when the client turned to it; None while it has not."""

    request: Request
    sent_s: float | None = None
    done: bool = False
    _pieces: list[_Piece] = field(default_factory=list)
    _reasons: dict[int, str] = field(default_factory=dict)
    _ids: dict[int, list[int]] = field(default_factory=dict)
    _told: dict[int | None, int] = field(default_factory=dict)
    _input: int | None = None
    _cached: int | None = None
    _empty: int = 0

    def take(self, event: bytes, now_s: float) -> None:
        """A chunk that came at `now_s`. Raises Fault where it is none, or says that the answer failed."""
        if event.strip() == DONE:
            self.done = True
            return
        try:
            chunk = json.loads(event)
        except (ValueError, RecursionError) as error:
            raise Fault(MALFORMED, f"a chunk that is no JSON: {_short(event)}") from error
        if not isinstance(chunk, dict):
            raise Fault(MALFORMED, f"a chunk that is no object: {_short(event)}")
        if chunk.get("error") or chunk.get("object") == "error":
            raise Fault(ERROR, _message(chunk))
        choices = chunk.get("choices") or []
        try:
            told = self._usage(chunk.get("usage"), choices)
            brought = [self._choice(choice, told, now_s) for choice in choices]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Fault(MALFORMED, f"a chunk that is no part of an answer: {_short(event)}") from error
        if told is None and not any(brought):
            self._empty += 1

    def _usage(self, usage: dict[str, Any] | None, choices: list[dict[str, Any]]) -> int | None:
        """Tokens of the answer so far by the server's own count: of all samples, or of the one that the chunk is of."""
        if not usage or usage.get("completion_tokens") is None:
            return None
        told = _whole(usage["completion_tokens"], LONGEST)
        of = int(choices[0].get("index") or 0) if len(choices) == 1 else None
        before = self._told.get(of, 0)
        self._told[of] = told
        if usage.get("prompt_tokens") is not None:
            self._input = _whole(usage["prompt_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self._cached = self._cached if cached is None else _whole(cached)
        return told - before

    def _choice(self, choice: dict[str, Any], told: int | None, now_s: float) -> bool:
        """One sample's part of a chunk; whether it brought anything."""
        sample = int(choice.get("index") or 0)
        if not 0 <= sample < self.request.n:
            raise ValueError(sample)
        delta = choice.get("delta") or {}
        text = "".join(part for part in (choice.get("text"), *(delta.get(name) for name in _TEXTS)) if part)
        length = len(text) or len(delta.get("tool_calls") or "")
        ids = choice.get("token_ids")
        if ids is not None:
            tokens: int | None = len(ids)
            self._ids.setdefault(sample, []).extend(map(_whole, ids))
        else:
            tokens = told if told and (length or not choice.get("finish_reason")) else None
        if tokens or (length and tokens is None):
            self._pieces.append(_Piece(now_s, sample, tokens, max(1, length)))
        if reason := choice.get("finish_reason"):
            self._reasons[sample] = str(reason)
            if reason in _BROKEN:
                raise Fault(ERROR, f"the server gave the answer up: {reason}")
        return bool(length or tokens or choice.get("finish_reason") or delta.get("role"))

    def ids(self, sample: int) -> list[int] | None:
        """The tokens of one sample so far; None where the server does not tell which they are."""
        return self._ids.get(sample)

    def check(self) -> None:
        """The stream has ended. Raises Fault where the answer is not whole, or has not one token."""
        if not self.done and len(self._reasons) < self.request.n:
            raise Fault(CUT, "the stream ended without a finish reason or [DONE]")
        if not any(self._counts()):
            raise Fault(EMPTY, f"the answer has no token{f', though usage tells {self._total}' if self._total else ''}")

    def _counts(self) -> list[int]:
        """How many tokens each piece brought."""
        shown = [piece.tokens for piece in self._pieces if piece.tokens is not None]
        whole = len(shown) == len(self._pieces)
        if (total := self._total) is not None:
            return spread(total, shown if whole else [piece.length for piece in self._pieces])
        return [piece.tokens or 1 for piece in self._pieces]

    @property
    def _total(self) -> int | None:
        """Output tokens by the server's usage; None where it told none."""
        if None in self._told:
            return self._told[None]
        return sum(self._told.values()) if self._told else None

    def records(self, status: str, reason: str, end_s: float, *, save_tokens: bool = False) -> list[RequestRecord]:
        """A record for each sample. `reason` says why it did not finish; one that did has its own. A request that was
        never sent was late by `end_s` at least."""
        counts = self._counts()
        times: dict[int, list[float]] = {sample: [] for sample in range(self.request.n)}
        chunks = dict.fromkeys(times, 0)
        for piece, count in zip(self._pieces, counts, strict=True):
            times[piece.sample] += [piece.at_s] * count
            chunks[piece.sample] += 1
        return [
            self._record(sample, of, chunks[sample], status, reason, end_s, save_tokens) for sample, of in times.items()
        ]

    def _record(
        self, sample: int, times: list[float], chunks: int, status: str, reason: str, end_s: float, save_tokens: bool
    ) -> RequestRecord:
        request, ids, cached = self.request, self.ids(sample), self._cached if sample == 0 else None
        if status == FINISHED and not times:
            status, reason = FAILED, str(Fault(EMPTY, "the answer has no token"))
        return RequestRecord(
            request=request.id,
            sample=sample,
            scheduled_s=request.scheduled_s,
            sent_s=end_s if self.sent_s is None else self.sent_s,
            input_tokens=len(request.prompt) if self._input is None else self._input,
            max_tokens=request.max_tokens,
            first_s=times[0] if times else None,
            last_s=times[-1] if times else None,
            token_s=times,
            output_tokens=len(times),
            cached_tokens=cached or 0,
            status=status,
            reason=self._reasons.get(sample, "stop") if status == FINISHED else reason,
            turn=request.turn,
            prompt_token_ids=list(request.prompt) if save_tokens else None,
            output_token_ids=ids if save_tokens else None,
            due_s=request.scheduled_s if request.sent_s is None else request.sent_s,
            asked_tokens=len(request.prompt),
            asked_output_tokens=request.output_tokens or request.max_tokens,
            told_cached_tokens=cached,
            told_tokens=None if self._total is None else len(times),
            streamed_tokens=None if ids is None else len(ids),
            chunks=chunks,
            empty_chunks=self._empty if sample == 0 else 0,
        )


def unsent(request: Request, end_s: float) -> list[RequestRecord]:
    """The records of a request that the run's end overtook."""
    return Answer(request).records(UNFINISHED, "the run ended first", end_s)


def spread(total: int, weights: list[int]) -> list[int]:
    """`total` tokens over pieces of these weights (each at least 1), at least one each and the rest in proportion to
    weight - 1: weights that add up to `total` come back as they are. Of fewer tokens than pieces the first piece has
    one, the last too, and those between evenly."""
    if not weights:
        return []
    if total < len(weights):
        places = {round(i * (len(weights) - 1) / max(1, total - 1)) for i in range(total)}
        return [int(place in places) for place in range(len(weights))]
    more, over = total - len(weights), [max(0, weight - 1) for weight in weights]
    if not any(over):
        over = [1] * len(weights)
    bounds, seen, whole = [0], 0, sum(over)
    for weight in over:
        seen += weight
        bounds.append((2 * more * seen + whole) // (2 * whole))  # to the nearest
    return [1 + after - before for before, after in pairwise(bounds)]


def _whole(value: object, most: int = 2**31) -> int:
    """A count that can be one: a wrong usage fills no memory."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(value)
    return value


def _message(chunk: dict[str, Any]) -> str:
    error = chunk.get("error") or chunk
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _short(event: bytes) -> str:
    return repr(event[:80].decode(errors="replace"))
