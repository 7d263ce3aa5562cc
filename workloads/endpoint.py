"""An OpenAI-compatible server: where it is, what it serves, and how a request is put so that it takes it.

The API key comes from the environment only, is in no record, and is taken out of whatever the server says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvbench.engine.types import Request
from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    import aiohttp

KEYS = ("KVBENCH_API_KEY", "OPENAI_API_KEY")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
IDLE_S = 3.0
"""A connection idle for longer is not used again: servers close theirs after 5 s, and the race would look like a
fault."""

Decode = Callable[[tuple[int, ...]], str]
"""Token ids to the text they stand for."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a request may be put: prompts as token `ids` or as text, `lengths` held by ignoring end-of-sequence, usage
    asked for, at the end or in `every_chunk`, and token ids of the answer with it."""

    ids: bool
    lengths: bool
    usage: bool
    every_chunk: bool

    def __str__(self) -> str:
        prompts = "prompts as token ids" if self.ids else "prompts as text"
        usage = "usage in every chunk" if self.every_chunk else "usage at the end" if self.usage else "no word of usage"
        lengths = "answers held to their length" if self.lengths else "it takes no ignore_eos, so answers may end early"
        return f"it takes {prompts} and is asked for {usage}; {lengths}"


WAYS = tuple(
    Way(ids, *rest)
    for rest in ((True, True, True), (True, True, False), (False, True, False), (False, False, False))
    for ids in (True, False)
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that answers. `model` is the name under which it serves, `software` what it says it is; `counts` whether
    it has counters that we know, `tells_ids` whether the tokens of its answers come by id. `decode` is there where
    prompts go as text."""

    url: str
    kind: str
    model: str
    way: Way
    software: str | None = None
    version: str | None = None
    counts: bool = False
    tells_ids: bool = False
    decode: Decode | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    @property
    def path(self) -> str:
        return self.url + PATHS[self.kind]

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **authorization(self.key)}

    def facts(self) -> dict[str, Any]:
        """As `run.json` keeps it; of the key nothing."""
        return {
            "url": self.url,
            "endpoint_type": self.kind,
            "model": self.model,
            "software": self.software,
            "version": self.version,
            "prompts_as": "token ids" if self.way.ids else "text",
            "lengths_held": self.way.lengths,
            "answers_with_ids": self.tells_ids,
            "usage_asked": self.way.usage,
            "counters": self.counts,
        }

    def body(self, request: Request) -> bytes:
        """The request as JSON. What it asks of sampling goes along only where it is not as by default."""
        way, sampling = self.way, request.sampling
        content: dict[str, Any] = {"model": self.model, "stream": True, "temperature": sampling.temperature}
        if self.kind == "chat":
            content["messages"] = [{"role": "user", "content": self._text(request)}]
        else:
            content["prompt"] = list(request.prompt) if way.ids else self._text(request)
        content["max_tokens"] = request.output_tokens or request.max_tokens
        if way.lengths and request.output_tokens is not None:
            content["ignore_eos"] = True  # min_tokens would add nothing but work to each step
        if way.usage:
            content["stream_options"] = {"include_usage": True}
        if way.every_chunk:
            content["stream_options"]["continuous_usage_stats"] = True
            content["return_token_ids"] = True
        if sampling.temperature:
            content["seed"] = sampling.seed
        if sampling.top_p != 1:
            content["top_p"] = sampling.top_p
        if sampling.repetition_penalty != 1:
            content["repetition_penalty"] = sampling.repetition_penalty
        if request.n > 1:
            content["n"] = request.n
        if request.cache_salt:
            content["cache_salt"] = request.cache_salt
        return json.dumps(content, separators=(",", ":")).encode()

    def _text(self, request: Request) -> str:
        assert self.decode is not None, "a way of texts is chosen only with a tokenizer"
        return self.decode(request.prompt)

    def plain(self, text: str, most: int = 300) -> str:
        """What a server said, on one line, without the key or a beginning of it that somebody cut off."""
        for size in range(len(self.key or ""), 5, -1):
            text = text.replace((self.key or "")[:size], "(key)")
        return " ".join(text.split())[:most]


def authorization(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def api_key() -> str | None:
    """From the environment, the first of `KEYS` that is set; KvbenchError, which does not tell it, where no header can
    carry it."""
    name = next((name for name in KEYS if os.environ.get(name, "").strip()), None)
    if name is None:
        return None
    key = os.environ[name].strip()
    if not (key.isascii() and key.isprintable()):
        raise KvbenchError(f"{name} holds characters that no HTTP header can carry; set it to the plain key")
    return key


def base_url(text: str) -> str:
    """`http://host:port`, whether or not `/v1` was typed behind it; KvbenchError where it is no address of a server."""
    try:
        parts = urlsplit(text.strip())
        usable = parts.scheme in ("http", "https") and _is_host(parts.hostname or "") and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise KvbenchError("--target must be an address such as http://127.0.0.1:8000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise KvbenchError(f"--target takes no user, password or query; put an API key into {KEYS[0]}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def _is_host(name: str) -> bool:
    """Whether anybody could look the name up; raises UnicodeError where a part of it is empty or too long."""
    return bool(name.encode("idna")) and not any(letter.isspace() for letter in name)


def open_session(url: str) -> aiohttp.ClientSession:
    """As many connections as the load asks for: a request never waits in here for another one's end. Certificates are
    checked against the system's, or those of `SSL_CERT_FILE`."""
    import ssl

    import aiohttp

    trust = ssl.create_default_context() if url.startswith("https:") else True
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=IDLE_S, ssl=trust)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=2**18,
    )
