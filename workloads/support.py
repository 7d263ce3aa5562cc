"""A support desk on a Friday afternoon: 64 chats of an invented shop, written for kvbench, behind one system prompt.

`support.jsonl` holds the system prompt and, for each chat, the customer's text and the reference answer. It carries
their lengths in SmolLM2's tokens too, so the workload has its shape on any model, even one without a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.workloads.datasets import Drawn, Outline, outlined, shuffled
from kvbench.workloads.streams import stream
from kvbench.workloads.text import Tokenizer, chat_ids, check_ids, text_ids

CHATS = Path(__file__).with_name("support.jsonl")


class Support:
    """The chats as prompts that share the system prompt as their prefix; an answer is as long as the reference answer.

    With a tokenizer the prompts are the real chats through its template, and lengths are its own. Without one, ids
    below `vocab_size` stand in for the texts: the same on every call, and exactly as many as SmolLM2 would need
    (`system_tokens` + `user_tokens`, the template's own tokens included).
    """

    name = "support"

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        if vocab_size < 1:
            raise KvbenchError(f"a vocabulary must have at least one token, not {vocab_size}")
        system, *chats = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
        if tokenizer is None:
            self._rows = _stand_ins(system, chats, vocab_size)
        else:
            self._rows = [_real(tokenizer, system["system"], chat) for chat in chats]
        for row in self._rows:
            check_ids(row.prompt, vocab_size)

    @property
    def longest_input(self) -> int:
        return max(len(row.prompt) for row in self._rows)

    @property
    def longest_output(self) -> int:
        return max(row.output_tokens for row in self._rows)

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """`count` chats in a seeded order; each comes once before any comes again."""
        return shuffled(self._rows, count, seed)

    def outline(self, count: int, seed: int) -> list[Outline]:
        return outlined(self.draw(count, seed))


def _stand_ins(system: dict[str, Any], chats: list[dict[str, Any]], vocab_size: int) -> list[Drawn]:
    rng = stream(0, "tokens")
    prefix, *users = [
        tuple(rng.integers(0, vocab_size, size=tokens).tolist())
        for tokens in [system["system_tokens"], *(chat["user_tokens"] for chat in chats)]
    ]
    return [Drawn(prefix + user, chat["answer_tokens"]) for user, chat in zip(users, chats, strict=True)]


def _real(tokenizer: Tokenizer, system: str, chat: dict[str, Any]) -> Drawn:
    return Drawn(
        _prompt(tokenizer, system, chat["user"]),
        len(text_ids(tokenizer, chat["answer"], add_special_tokens=False)),
    )


def _prompt(tokenizer: Tokenizer, system: str, user: str) -> tuple[int, ...]:
    """Through the chat template where there is one; the system prompt opens the text in any case."""
    folded = f"{system}\n\n{user}"
    if tokenizer.chat_template is None:
        return text_ids(tokenizer, f"{folded}\n\n")
    turn = {"role": "user", "content": user}
    try:
        return chat_ids(tokenizer, [{"role": "system", "content": system}, turn])
    except KvbenchError:  # Gemma's template, for one, knows no system role
        return chat_ids(tokenizer, [{"role": "user", "content": folded}])
