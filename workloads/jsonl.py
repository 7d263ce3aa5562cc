"""Prompts of your own: a JSON object a line, texts, ids or chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.workloads.datasets import Drawn, Outline, outlined, shuffled
from kvbench.workloads.lengths import LONGEST
from kvbench.workloads.text import Tokenizer, chat_ids, check_ids, text_ids

_KEYS = {"prompt", "messages", "output_tokens"}


class Jsonl:
    """The lines of a file, read and checked at once, drawn in a seeded order.

    A line holds `{"prompt": text}` or `{"prompt": [ids]}` or `{"messages": [{"role": …, "content": …}, …]}`, and may
    say how long the answer is: `"output_tokens": n`. Lines that don't say it get `output_tokens`. Blank lines are
    skipped. Every error names file and line.
    """

    name = "jsonl"

    def __init__(self, path: Path, tokenizer: Tokenizer | None, vocab_size: int, output_tokens: int) -> None:
        if output_tokens < 1:
            raise KvbenchError(f"--output-len must be at least 1 token, not {output_tokens}")
        self._tokenizer, self._vocab_size, self._output_tokens = tokenizer, vocab_size, output_tokens
        self._rows = self._read(path)
        if not self._rows:
            raise KvbenchError(f"{path} holds no prompts; give it one JSON object a line")

    @property
    def longest_input(self) -> int:
        return max(len(row.prompt) for row in self._rows)

    @property
    def longest_output(self) -> int:
        return max(row.output_tokens for row in self._rows)

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """`count` lines; the file starts over, in a new order, when it runs out."""
        return shuffled(self._rows, count, seed)

    def outline(self, count: int, seed: int) -> list[Outline]:
        return outlined(self.draw(count, seed))

    def _read(self, path: Path) -> list[Drawn]:
        rows = []
        if path.exists() and not path.is_file():
            raise KvbenchError(f"--dataset-path {path} is no file; give it a file of one JSON object a line")
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        rows.append(self._row(line, f"{path}:{number}"))
        except OSError as error:
            raise KvbenchError(f"cannot read --dataset-path {path}: {error.strerror}") from error
        return rows

    def _row(self, line: bytes, where: str) -> Drawn:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise KvbenchError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise KvbenchError(f'{where} must be an object like {{"prompt": "…"}}')
        if unknown := sorted(row.keys() - _KEYS):
            raise KvbenchError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
        if ("prompt" in row) == ("messages" in row):
            raise KvbenchError(f"{where} must have either `prompt` or `messages`")
        output_tokens = row.get("output_tokens", self._output_tokens)
        if type(output_tokens) is not int or not 1 <= output_tokens <= LONGEST:
            raise KvbenchError(
                f"{where} has output_tokens {output_tokens!r}; it must be a whole number from 1 to {LONGEST:,}"
            )
        try:
            prompt = self._prompt(row)
            check_ids(prompt, self._vocab_size)
        except KvbenchError as error:
            raise KvbenchError(f"{where}: {error}") from error
        if not prompt:
            raise KvbenchError(f"{where} has an empty prompt; give it at least one token")
        return Drawn(prompt, output_tokens, limit=output_tokens)

    def _prompt(self, row: dict[str, Any]) -> tuple[int, ...]:
        """The ids of a line, which has one of the two keys."""
        prompt = row.get("prompt")
        if isinstance(prompt, list):
            if any(type(token) is not int for token in prompt):
                raise KvbenchError("a `prompt` that is a list must hold token ids, which are whole numbers")
            return tuple(prompt)
        if self._tokenizer is None:
            raise KvbenchError("this model has no tokenizer to read text with; give `prompt` as a list of token ids")
        if "messages" in row:
            return chat_ids(self._tokenizer, _messages(row["messages"]))
        if not isinstance(prompt, str):
            raise KvbenchError(f"`prompt` must be a text or a list of token ids, not {json.dumps(prompt)}")
        return text_ids(self._tokenizer, prompt) if prompt else ()


def _messages(messages: object) -> list[dict[str, str]]:
    """The messages of a chat, once they are known to be some."""
    if not isinstance(messages, list) or not messages:
        raise KvbenchError("`messages` must be a list of at least one message")
    for message in messages:
        if not (
            isinstance(message, dict)
            and message.keys() == {"role", "content"}
            and all(isinstance(text, str) for text in message.values())
        ):
            raise KvbenchError("a message must have a `role` and a `content`, both texts, and nothing else")
    return messages
