"""How much load one client process can put to a server, and how late its requests leave: `make bench`.

A server that does nothing, in a process of its own, answers every request with one token at once; the client draws a
Poisson schedule and drives it as a sweep would. Not a test: it asserts nothing and prints what it measured.

    python tests/bench_client.py [--rate 1000] [--seconds 30] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import time
from collections.abc import Sequence
from statistics import median

from kvbench.engine.types import Request
from kvbench.metrics.records import FINISHED
from kvbench.metrics.summary import summarise
from kvbench.workloads.arrivals import schedule
from kvbench.workloads.client import serve_by
from kvbench.workloads.connect import connect
from kvbench.workloads.load import OpenLoop

CHUNK = {"choices": [{"index": 0, "text": "a", "token_ids": [5], "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 1}}
STREAM = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in (CHUNK, USAGE)) + b"data: [DONE]\n\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "nothing", "owned_by": "bench"}]}).encode()


def _response(kind: str, body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


ANSWER = _response("text/event-stream", STREAM)


class Nothing(asyncio.Protocol):
    """A request in, the same answer out."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length:")
            size = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._data) < end + 4 + size:
                return
            self._data = self._data[end + 4 + size :]
            if head.startswith(b"post"):
                self._transport.write(ANSWER)
            elif b"/v1/models" in head.split(b"\r\n", 1)[0]:
                self._transport.write(_response("application/json", MODELS))
            else:
                self._transport.write(_response("text/plain", b"", "404 Not Found"))


def serve_nothing(told: multiprocessing.connection.Connection) -> None:
    """Tell the port, serve until the process is ended."""

    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(Nothing, "127.0.0.1", 0, backlog=1024)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


def once(url: str, rate_per_s: float, seconds: float, seed: int) -> dict[str, float]:
    """One run of the schedule of that seed."""
    count = round(rate_per_s * seconds)
    times = schedule("poisson", count, rate_per_s, seed)
    prompt = tuple(range(16))
    requests = [Request(number, prompt, 1, 1, scheduled_s=at_s) for number, at_s in enumerate(times)]
    endpoint = connect(url, "completions", requests[0])
    before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run = serve_by(OpenLoop(requests), endpoint)
    took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF)
    row = summarise(run)
    drawn = (count - 1) / (times[-1] - times[0])
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lags_s = [one.sent_s - one.scheduled_s for one in run.requests]
    return {
        "drawn requests/s": drawn,
        "achieved requests/s": float(row["achieved_rate_per_s"] or 0),
        "achieved % of drawn": 100 * float(row["achieved_rate_per_s"] or 0) / drawn,
        "answered %": 100 * sum(one.status == FINISHED for one in run.requests) / count,
        "send lag p50 ms": 1e3 * float(row["send_lag_p50_s"] or 0),
        "send lag p99 ms": 1e3 * float(row["send_lag_p99_s"] or 0),
        "send lag max ms": 1e3 * max(lags_s),
        "TTFT p50 ms": 1e3 * float(row["ttft_p50_s"] or 0),
        "client CPU %": 100 * cpu_s / took_s,
        "client CPU ms/request": 1e3 * cpu_s / count,
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Load one client process against a server that does nothing.")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(args)
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve_nothing, args=(there,), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{here.recv()}"
        once(url, asked.rate, 2.0, 99)  # connections, caches, the interpreter's own warm-up
        runs = [once(url, asked.rate, asked.seconds, seed) for seed in range(asked.repeats)]
    finally:
        server.terminate()
        server.join()
    load = f"{asked.rate:g} requests/s for {asked.seconds:g} s, Poisson, {asked.repeats} repeats"
    print(f"{load}; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':24}{'median':>10}{'least':>10}{'most':>10}")
    for name in runs[0]:
        values = [run[name] for run in runs]
        print(f"{name:24}{median(values):10.2f}{min(values):10.2f}{max(values):10.2f}")


if __name__ == "__main__":
    main()
