"""Conversations in ShareGPT's format: one JSON list of `{"conversations": [{"from": "human", "value": …}, …]}`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.workloads.datasets import Drawn, Outline, Turn, outlined, shuffled
from kvbench.workloads.text import Tokenizer, chat_ids, check_ids, text_ids, turn_ids

_ASKS, _ANSWERS = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bard", "bing"}
_OTHERS = {"system", "tool", "function_call", "observation"}


class ShareGpt:
    """The conversations of a file, up to `turns` turns of each (1: first turns only), in a seeded order.

    A turn is a text of the human's with an answer after it. Its length is that answer's; what stands in the next turn's
    prompt is the answer really given. A conversation without such a turn is left out; `note` counts them.
    """

    name = "sharegpt"

    def __init__(self, path: Path, tokenizer: Tokenizer | None, vocab_size: int, turns: int = 1) -> None:
        if tokenizer is None:
            raise KvbenchError("--dataset sharegpt holds texts, and this model has no tokenizer; name one that has")
        self.turns = turns
        found = [_row(tokenizer, pairs[:turns], vocab_size, where) for where, pairs in _conversations(path)]
        self._rows = [row for row in found if row is not None]
        if not self._rows:
            raise KvbenchError(f"{path} holds no conversation in which a human asks and is answered")
        left_out = len(found) - len(self._rows)
        self.note = f"{left_out} conversations without an answered question left out" if left_out else ""

    @property
    def longest_input(self) -> int:
        return max(outline.input_tokens for outline in outlined(self._rows))

    @property
    def longest_output(self) -> int:
        return max(turn.output_tokens for row in self._rows for turn in (row, *row.later))

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """`count` requests; the file starts over, in a new order, when it runs out."""
        return shuffled(self._rows, count, seed)

    def outline(self, count: int, seed: int) -> list[Outline]:
        return outlined(self.draw(count, seed))


def _load(path: Path) -> list[object]:
    if path.exists() and not path.is_file():
        raise KvbenchError(f"--dataset-path {path} is no file; give it a ShareGPT JSON file")
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise KvbenchError(f"cannot read --dataset-path {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise KvbenchError(f"{path}:{error.lineno} is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise KvbenchError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, list):
        raise KvbenchError(f"{path} must be a list of conversations, as ShareGPT's files are")
    return found


def _conversations(path: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each conversation's place and its questions, each with its answer."""
    found = []
    for number, item in enumerate(_load(path)):
        where = f"{path}, conversation {number}"
        messages = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(messages, list):
            raise KvbenchError(f"{where} must be an object with a list of `conversations`")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("value"), str):
                raise KvbenchError(f"{where} has a message without a `value` that is a text")
            sender = message.get("from")
            if not isinstance(sender, str) or sender not in _ASKS | _ANSWERS | _OTHERS:
                raise KvbenchError(f"{where} has a message from {sender!r}; known are human and gpt")
        pairs = [
            (asked["value"], answer["value"])
            for asked, answer in pairwise(messages)
            if asked["from"] in _ASKS and answer["from"] in _ANSWERS and asked["value"] and answer["value"]
        ]
        found.append((where, pairs))
    return found


def _row(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], vocab_size: int, where: str) -> Drawn | None:
    """One conversation up to the first turn without a token on either side; None where none is left."""
    try:
        turns = []
        for number, (asked, answer) in enumerate(pairs):
            ids = turn_ids(tokenizer, asked) if number else _opening(tokenizer, asked)
            check_ids(ids, vocab_size)
            tokens = len(text_ids(tokenizer, answer, add_special_tokens=False))
            if not ids or not tokens:
                break
            turns.append(Turn(ids, tokens, limit=tokens))
    except KvbenchError as error:
        raise KvbenchError(f"{where}: {error}") from error
    if not turns:
        return None
    opening, *later = turns
    return Drawn(opening.prompt, opening.output_tokens, opening.limit, tuple(later))


def _opening(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        return text_ids(tokenizer, text)
    return chat_ids(tokenizer, [{"role": "user", "content": text}])
