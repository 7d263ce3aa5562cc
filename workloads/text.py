"""From text to token ids through a transformers tokenizer, with errors a user can act on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvbench.errors import KvbenchError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def chat_template(self) -> Any:
        """The template's source, or None for a model that was not trained on chats."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """The text's ids."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        return_dict: bool,
        tokenize: bool = True,
    ) -> Any:
        """The chat's ids, or its text where not to `tokenize`."""


def text_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """The text's ids; KvbenchError where it holds what no tokenizer reads."""
    _check_text(text)
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _check_text(text: str) -> None:
    """JSON can name half a character, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise KvbenchError(
            f"a text has {text[error.start]!r}, one of the two surrogates that make a character; write both or none"
        ) from error


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[int, ...]:
    """The prompt of a chat, ready for the assistant's next turn, through the tokenizer's own template."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise KvbenchError("this model's tokenizer has no chat template; give `prompt` texts instead of `messages`")
    for message in messages:
        _check_text(message["content"])
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise KvbenchError(f"the model's chat template refuses these messages: {error}") from error
    return tuple(ids)


_ANSWER = "kvbench-answer"


def turn_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """What a chat's template puts between an answer and the next one: the end of the assistant's turn and the user's
    whole `text`, ready to follow on an answer that ended by its length."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        return text_ids(tokenizer, f"\n\n{text}\n\n", add_special_tokens=False)
    roles = [("user", "-"), ("assistant", _ANSWER), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in roles]
    try:
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, tokenize=False)
    except TemplateError as error:
        raise KvbenchError(f"the model's chat template refuses these messages: {error}") from error
    _, found, tail = chat.partition(_ANSWER)
    if not found:
        raise KvbenchError(
            "the model's chat template drops earlier answers, so no conversation can go on; use --turns 1"
        )
    return text_ids(tokenizer, tail, add_special_tokens=False)


def check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside [0, vocab_size): the model has no embedding for them."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise KvbenchError(
                f"token id {token} lies outside the model's vocabulary of {vocab_size}; "
                "use ids or a tokenizer that belong to this model"
            )
