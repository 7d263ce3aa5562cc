"""Finds out what a server is before anything runs: that it answers, what it serves, and how it wants to be asked.

A first short request is put to it in the ways of `WAYS`, the most telling first; the first one it takes is how all
others are put.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbench.engine.types import Request
from kvbench.errors import KvbenchError
from kvbench.workloads.counters import read
from kvbench.workloads.endpoint import KEYS, WAYS, Decode, Endpoint, Way, api_key, authorization, base_url, open_session
from kvbench.workloads.exchange import ask, fault_of
from kvbench.workloads.faults import Fault

if TYPE_CHECKING:
    import aiohttp


FIRST_S = 300.0
"""So long the first answer may take: some servers load their model for it."""


def connect(
    target: str,
    kind: str,
    first: Request,
    *,
    model: str | None = None,
    decode: Decode | None = None,
    patience_s: float = FIRST_S,
) -> Endpoint:
    """The server at `target`, once it has answered a short beginning of the request `first`. `model`: the name that it
    serves under, where it is not the only one. KvbenchError where nobody answers or not as an OpenAI server does."""
    return asyncio.run(_connect(base_url(target), kind, first, model, decode, patience_s))


async def _connect(
    url: str, kind: str, first: Request, model: str | None, decode: Decode | None, patience_s: float
) -> Endpoint:
    key = api_key()
    endpoint = Endpoint(url, kind, "", WAYS[0], decode=decode, key=key)
    async with open_session(url) as session:
        listed = await _models(session, endpoint)
        served = _chosen(endpoint, listed, model)
        endpoint = replace(
            endpoint,
            model=endpoint.plain(str(served["id"])),
            software=endpoint.plain(str(served["owned_by"])) if served.get("owned_by") else None,
            version=await _version(session, endpoint),
            counts=await _counts(session, endpoint),
        )
        return await _way(session, endpoint, first, patience_s)


async def _get(session: aiohttp.ClientSession, endpoint: Endpoint, path: str) -> tuple[int, str]:
    async with (
        asyncio.timeout(10),
        session.get(endpoint.url + path, headers=authorization(endpoint.key), allow_redirects=False) as response,
    ):
        return response.status, (await response.read()).decode(errors="replace")


async def _models(session: aiohttp.ClientSession, endpoint: Endpoint) -> list[dict[str, Any]]:
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


def _chosen(endpoint: Endpoint, listed: list[dict[str, Any]], model: str | None) -> Mapping[str, Any]:
    """The model that was told, else the only one."""
    if model is not None:
        return next((one for one in listed if one["id"] == model), {"id": model})
    if len(listed) != 1:
        names = endpoint.plain(", ".join(str(one["id"]) for one in listed[:5])) or "none"
        raise KvbenchError(
            f"the server at {endpoint.url} lists {len(listed)} models ({names}); name one: --served-model-name"
        )
    return listed[0]


async def _version(session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
    """vLLM tells it; others perhaps not."""
    try:
        status, text = await _get(session, endpoint, "/version")
        return endpoint.plain(str(json.loads(text)["version"]), 80) if status == 200 else None
    except Exception:
        return None


async def _counts(session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
    try:
        status, text = await _get(session, endpoint, "/metrics")
        return status == 200 and bool(read(text, 0.0).told)
    except Exception:
        return False


async def _way(session: aiohttp.ClientSession, endpoint: Endpoint, first: Request, patience_s: float) -> Endpoint:
    """The endpoint with the first way that the server takes."""
    short = replace(first, prompt=first.prompt[:8], max_tokens=2, output_tokens=first.output_tokens and 2)
    fault = None
    for way in _open_ways(endpoint):
        tried = replace(endpoint, way=way)
        try:
            answer = await ask(session, tried, short, patience_s)
            return replace(tried, tells_ids=answer.ids(0) is not None)
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
