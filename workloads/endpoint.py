"""An OpenAI-compatible server: where it is, what it serves, and how a request is put so that it takes it.

Before anything runs, a first short request is put to it in the ways of `WAYS`, the most telling first; the first one it
takes is how all others are put. The API key comes from the environment only, is in no record, and is taken out of
whatever the server says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvbench.engine.types import Request
from kvbench.errors import KvbenchError
from kvbench.workloads.faults import Fault

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
    it has counters that we know. `decode` is there where prompts go as text."""

    url: str
    kind: str
    model: str
    way: Way
    software: str | None = None
    version: str | None = None
    counts: bool = False
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
            content |= {"ignore_eos": True, "min_tokens": request.output_tokens}
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
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise KvbenchError("--target must be an address such as http://127.0.0.1:8000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise KvbenchError(f"--target takes no user, password or query; put an API key into {KEYS[0]}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


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


def connect(
    target: str, kind: str, first: Request, *, model: str | None = None, decode: Decode | None = None
) -> Endpoint:
    """The server at `target`, once it has answered a short beginning of the request `first`. `model`: the name that it
    serves under, where it is not the only one. KvbenchError where nobody answers or not as an OpenAI server does."""
    import asyncio

    return asyncio.run(_connect(base_url(target), kind, first, model, decode))


async def _connect(url: str, kind: str, first: Request, model: str | None, decode: Decode | None) -> Endpoint:
    key = api_key()
    endpoint = Endpoint(url, kind, "", WAYS[0], decode=decode, key=key)
    async with open_session(url) as session:
        listed = await _models(session, endpoint)
        served = _chosen(url, listed, model)
        endpoint = replace(
            endpoint,
            model=str(served["id"]),
            software=str(served["owned_by"]) if served.get("owned_by") else None,
            version=await _version(session, endpoint),
            counts=await _counts(session, endpoint),
        )
        return await _way(session, endpoint, first)


async def _get(session: aiohttp.ClientSession, endpoint: Endpoint, path: str) -> tuple[int, str]:
    import asyncio

    async with (
        asyncio.timeout(10),
        session.get(endpoint.url + path, headers=authorization(endpoint.key), allow_redirects=False) as response,
    ):
        return response.status, (await response.content.read(2**22)).decode(errors="replace")


async def _models(session: aiohttp.ClientSession, endpoint: Endpoint) -> list[dict[str, Any]]:
    from kvbench.workloads.client import fault_of

    url = endpoint.url
    try:
        status, text = await _get(session, endpoint, "/v1/models")
    except Exception as error:
        fault = fault_of(error)
        if fault is None:
            raise
        raise KvbenchError(f"no server answers at --target {url} ({endpoint.plain(str(fault))}); start it") from error
    if status in (401, 403):
        hint = "does not accept the key in" if endpoint.key else "wants an API key; put it into"
        raise KvbenchError(f"the server at {url} {hint} {KEYS[0]} (http {status})")
    try:
        listed = json.loads(text)["data"] if status == 200 else None
        models = [model for model in listed or [] if isinstance(model, dict) and model.get("id")]
    except (ValueError, KeyError, TypeError):
        listed = None
    if listed is None:
        raise KvbenchError(f"{url} is no OpenAI-compatible server: GET /v1/models gave http {status}, not its models")
    return models


def _chosen(url: str, listed: list[dict[str, Any]], model: str | None) -> Mapping[str, Any]:
    """The model that was told, else the only one."""
    if model is not None:
        return next((one for one in listed if one["id"] == model), {"id": model})
    if len(listed) != 1:
        names = ", ".join(str(one["id"]) for one in listed[:5]) or "none"
        raise KvbenchError(f"the server at {url} lists {len(listed)} models ({names}); name one: --served-model-name")
    return listed[0]


async def _version(session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
    """vLLM tells it; others perhaps not."""
    try:
        status, text = await _get(session, endpoint, "/version")
        return str(json.loads(text)["version"])[:80] if status == 200 else None
    except Exception:
        return None


async def _counts(session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
    from kvbench.workloads.counters import read

    try:
        status, text = await _get(session, endpoint, "/metrics")
        return status == 200 and bool(read(text, 0.0).told)
    except Exception:
        return False


async def _way(session: aiohttp.ClientSession, endpoint: Endpoint, first: Request) -> Endpoint:
    """The endpoint with the first way that the server takes."""
    from kvbench.workloads.client import ask

    short = replace(first, prompt=first.prompt[:8], max_tokens=2, output_tokens=first.output_tokens and 2)
    fault = None
    for way in _open_ways(endpoint):
        tried = replace(endpoint, way=way)
        try:
            await ask(session, tried, short, patience_s=300)
            return tried
        except Fault as error:
            fault = error
            if error.kind in ("http 401", "http 403", "http 404", "http 429", "http 503") or not _refusal(error.kind):
                break
    text = fault is not None and "http 4" in fault.kind and endpoint.decode is None
    hint = " (as text it may: give a --model that has a tokenizer)" if text else ""
    raise KvbenchError(f"{endpoint.path} does not answer a first request: {endpoint.plain(str(fault))}{hint}")


def _refusal(kind: str) -> bool:
    """Whether the server may take the same request put in another way."""
    return kind.startswith(("http 4", "http 5", "error", "malformed"))


def _open_ways(endpoint: Endpoint) -> Iterator[Way]:
    """A chat goes as text, and text needs a tokenizer."""
    for way in WAYS:
        if not way.ids if endpoint.kind == "chat" else (way.ids or endpoint.decode is not None):
            yield way
