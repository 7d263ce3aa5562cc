"""A real HTTP server on this machine that answers as OpenAI's does, or as badly as a test asks, in its own thread.

It writes every byte itself, so it can also break the rules: hang, reset, lie about its usage. How it answers a request
is chosen by `script` from the request's body; `WHOLE` is how a good server does.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

Body = Mapping[str, Any]


def chunk(text: str = "", *, ids: list[int] | None = None, finish: str | None = None, **more: object) -> bytes:
    """An event with one choice of a completion."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return event({"choices": [choice], **more})


def event(content: object) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def usage(output: int, prompt: int = 3, **more: object) -> bytes:
    """The last chunk, without a choice."""
    told = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **more}
    return event({"choices": [], "usage": told})


DONE = event(b"[DONE]")
END, RESET, HANG, CLOSE = "end", "reset", "hang", "close"


class Reply:
    """What is sent: `parts` one by one, each as a chunk of HTTP, then the `end`: in order, or by resetting the
    connection, hanging, or closing it in the middle."""

    def __init__(
        self, *parts: bytes, end: str = END, status: str = "200 OK", kind: str = "text/event-stream", raw: bytes = b""
    ) -> None:
        self.parts, self.end, self.status, self.kind, self.raw = parts, end, status, kind, raw


def whole(body: Body) -> Reply:
    """A token a chunk, as many as asked, each with its id where ids are asked for."""
    n = int(body["max_tokens"])
    prompt = body.get("prompt", "")
    size = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
    ids = bool(body.get("return_token_ids"))
    parts = [chunk(" a", ids=[5] if ids else None, finish="length" if i == n - 1 else None) for i in range(n)]
    return Reply(*parts, *([usage(n, size)] if "stream_options" in body else []), DONE)


class OpenAIServer:
    """`with OpenAIServer() as server: server.url`. `seen` are the bodies of all requests, `keys` their authorization.
    `metrics` makes the text of /metrics, `models` the ids listed; `tls` serves https."""

    def __init__(
        self,
        script: Callable[[Body], Reply] = whole,
        *,
        metrics: Callable[[OpenAIServer], str] | None = None,
        models: tuple[str, ...] = ("served",),
        model_status: str = "200 OK",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.script, self.metrics, self.models, self.model_status, self.tls = script, metrics, models, model_status, tls
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.output = self.input = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Nobody listens any more, and every connection is gone."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=self.tls, limit=2**24)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            while await self._request(reader, writer):
                pass
        self._writers.discard(writer)
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection goes on."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.keys.append(headers.get("authorization", ""))
        path = first.split(" ")[1]
        if path == "/v1/models":
            content = json.dumps({"object": "list", "data": [{"id": name, "owned_by": "test"} for name in self.models]})
            return await self._send(writer, Reply(content.encode(), status=self.model_status, kind="application/json"))
        if path == "/metrics" and self.metrics is not None:
            return await self._send(writer, Reply(self.metrics(self).encode(), kind="text/plain"))
        if not path.endswith("/completions"):
            return await self._send(writer, Reply(b"{}", status="404 Not Found", kind="application/json"))
        asked = json.loads(body)
        self.seen.append({"path": path, **asked})
        reply = self.script(asked)
        self.output += int(asked["max_tokens"])
        self.input += len(asked["prompt"]) if isinstance(asked.get("prompt"), list) else 0
        return await self._send(writer, reply)

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> bool:
        if reply.raw:
            writer.write(reply.raw)
            await writer.drain()
            return False
        head = f"HTTP/1.1 {reply.status}\r\nContent-Type: {reply.kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        if reply.parts or reply.end == END:
            writer.write(head.encode())
        async for part in _one_by_one(reply.parts):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        if reply.end == HANG:
            await self._stopping.wait()
            return False
        if reply.end == RESET:
            await asyncio.sleep(0.05)  # let what was sent arrive: a reset may overtake it
            writer.transport.abort()
            return False
        if reply.end == CLOSE:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _one_by_one(parts: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    """Each in a turn of the loop of its own, so that the client may see it alone."""
    for part in parts:
        yield part
        await asyncio.sleep(0)
