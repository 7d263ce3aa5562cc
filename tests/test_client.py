"""Driving a real HTTP server: every fault is counted by its kind, nothing is lost, and the run always ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai_server import CLOSE, DONE, HANG, RESET, Body, OpenAIServer, Reply, chunk, event, usage, whole

from kvbench.engine.types import Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, UNFINISHED, RequestRecord, Run
from kvbench.metrics.remote import kind
from kvbench.metrics.summary import summarise
from kvbench.workloads.client import serve_by
from kvbench.workloads.connect import connect
from kvbench.workloads.endpoint import WAYS, Endpoint, base_url
from kvbench.workloads.load import ClosedLoop, OpenLoop

MIB = 2**20
TWO = chunk(" a", ids=[5]) + chunk(" b", ids=[6])

BAD: dict[str, tuple[Reply, str, int]] = {
    "hangs before it answers": (Reply(end=HANG), "timeout", 0),
    "hangs in the middle": (Reply(TWO, end=HANG), "timeout", 2),
    "resets before it answers": (Reply(end=RESET), "reset", 0),
    "resets in the middle": (Reply(TWO, end=RESET), "reset", 2),
    "closes in the middle": (Reply(TWO, end=CLOSE), "reset", 2),
    "ends without a finish": (Reply(TWO), "cut", 2),
    "429": (Reply(b'{"error": "slow down"}', status="429 Too Many Requests", kind="application/json"), "http 429", 0),
    "500": (Reply(b"oh", status="500 Internal Server Error", kind="text/plain"), "http 500", 0),
    "redirects": (Reply(status="307 Temporary Redirect"), "http 307", 0),
    "no event stream": (Reply(b'{"choices": []}', kind="application/json"), "malformed", 0),
    "rubbish for an event": (Reply(TWO, b"this is no event\n\n"), "malformed", 2),
    "rubbish for JSON": (Reply(TWO, event(b'{"choices": [')), "malformed", 2),
    "an array": (Reply(event([1, 2])), "malformed", 0),
    "a choice that is none": (Reply(event({"choices": [7]})), "malformed", 0),
    "a choice nobody asked for": (Reply(event({"choices": [{"index": 3, "text": "x"}]})), "malformed", 0),
    "usage of -1": (Reply(TWO, usage(-1)), "malformed", 2),
    "usage beyond any answer": (Reply(TWO, usage(10**12)), "malformed", 2),
    "usage beyond any prompt": (Reply(TWO, usage(2, 10**20)), "malformed", 2),
    "no HTTP": (Reply(raw=b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "malformed", 0),
    "10 MB in one event": (Reply(TWO, event({"choices": [{"index": 0, "text": "x" * 10 * MIB}]})), "oversized", 2),
    "10 MB without an end": (Reply(b"data: " + b"x" * 10 * MIB, end=HANG), "oversized", 0),
    "an error in the stream": (Reply(TWO, event({"error": {"message": "out of blocks"}})), "error", 2),
    "gives up": (Reply(TWO, chunk(finish="abort")), "error", 2),
    "no token": (Reply(chunk(finish="stop"), usage(0), DONE), "empty", 0),
}

GOOD: dict[str, Reply] = {
    "a token a chunk": whole({"max_tokens": 4, "prompt": [0, 7, 7], "return_token_ids": True, "stream_options": {}}),
    "several tokens a chunk": Reply(
        chunk(" abc", ids=[5, 6, 7]), chunk(" d", ids=[8], finish="length"), usage(4), DONE
    ),
    "several tokens, no ids": Reply(chunk(" abc"), chunk(" d", finish="length"), usage(4), DONE),
    "empty chunks": Reply(
        b": ping\n\n", event({"choices": []}), chunk(), TWO, chunk(), TWO, chunk(finish="length"), usage(4), DONE
    ),
    "CRLF": Reply(*(part.replace(b"\n", b"\r\n") for part in (TWO, TWO, chunk(finish="length"), usage(4), DONE))),
    "cut anywhere": Reply(*(bytes([byte]) for byte in TWO + TWO + chunk(finish="length") + usage(4) + DONE)),
    "no last blank line": Reply(TWO, TWO, chunk(finish="length"), usage(4).rstrip()),
    "no [DONE]": Reply(TWO, TWO, chunk(finish="length", usage={"completion_tokens": 4, "prompt_tokens": 3})),
    "no finish reason": Reply(TWO, TWO, usage(4), DONE),
    "hangs behind [DONE]": Reply(TWO, TWO, chunk(finish="length"), usage(4), DONE, end=HANG),
    "resets behind [DONE]": Reply(TWO, TWO, chunk(finish="length"), usage(4), DONE, end=RESET),
}

KINDS = [*BAD, *GOOD]


def scripted(body: Body) -> Reply:
    """The first token of a prompt says how it is answered."""
    name = KINDS[body["prompt"][0]]
    return BAD[name][0] if name in BAD else GOOD[name]


def request(number: int, first: int = 0, n: int = 1, at_s: float = 0.0) -> Request:
    return Request(number, (first, 7, 7), max_tokens=9, output_tokens=4, n=n, scheduled_s=at_s)


def endpoint(server: OpenAIServer) -> Endpoint:
    return Endpoint(server.url, "completions", "served", WAYS[0], counts=server.metrics is not None)


@pytest.fixture(scope="module")
def everything() -> Iterator[tuple[Run, int]]:
    """Every kind twice, in one closed loop of eight, and how many requests reached the server."""
    asked = [request(number, number % len(KINDS)) for number in range(2 * len(KINDS))]
    with OpenAIServer(scripted) as server:
        load = ClosedLoop(asked, 8)
        run = serve_by(load, endpoint(server), request_timeout_s=1.0)
        assert (load.remaining, load.in_flight) == (0, 0)
        yield run, len(server.seen)


def records_of(run: Run, name: str) -> list[RequestRecord]:
    return [record for record in run.requests if record.request % len(KINDS) == KINDS.index(name)]


@pytest.mark.parametrize("name", BAD)
def test_a_fault_ends_its_request_with_its_kind(everything: tuple[Run, int], name: str) -> None:
    _, word, tokens = BAD[name]
    for record in records_of(everything[0], name):
        assert (record.status, kind(record.reason)) == (ABORTED if word == "timeout" else FAILED, word)
        assert (record.output_tokens, len(record.token_s)) == (tokens, tokens)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_answer_is_whole_however_it_comes(everything: tuple[Run, int], name: str) -> None:
    for record in records_of(everything[0], name):
        assert (record.status, record.output_tokens, record.input_tokens) == (FINISHED, 4, 3), record.reason
        assert record.token_s == sorted(record.token_s) and record.sent_s >= record.scheduled_s
        assert (record.first_s, record.last_s) == (record.token_s[0], record.token_s[-1])


def test_nothing_is_lost_and_nothing_asked_twice(everything: tuple[Run, int]) -> None:
    run, reached = everything
    assert [record.request for record in run.requests] == list(range(2 * len(KINDS)))
    assert reached == 2 * len(KINDS)
    row = summarise(run)
    expected = Counter(word for _, word, _ in BAD.values())
    found = {name.removeprefix("errors_"): value for name, value in row.items() if name.startswith("errors_")}
    assert found == {word.replace(" ", "_"): 2 * count for word, count in expected.items()}
    assert row["requests_finished"] == 2 * len(GOOD)
    assert row["requests_aborted"] == 2 * expected["timeout"]
    assert row["requests_failed"] == 2 * (len(BAD) - expected["timeout"])


def test_a_chunk_gives_all_its_tokens_its_own_time(everything: tuple[Run, int]) -> None:
    for name in ("several tokens a chunk", "several tokens, no ids"):
        for record in records_of(everything[0], name):
            assert record.token_s[0] == record.token_s[1] == record.token_s[2] and record.chunks == 2
    (record, _) = records_of(everything[0], "empty chunks")
    assert (record.chunks, record.empty_chunks) == (4, 3)


def test_a_server_that_is_gone_refuses_every_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = Endpoint(f"http://127.0.0.1:{unused.getsockname()[1]}", "completions", "served", WAYS[0])
    run = serve_by(ClosedLoop([request(number) for number in range(5)], 2), gone)
    assert [kind(record.reason) for record in run.requests] == ["refused"] * 5
    assert run.remote and run.samples == []


def test_an_open_loop_waits_for_nobody() -> None:
    """All five are sent though none is answered."""
    with OpenAIServer(lambda body: Reply(end=HANG)) as server:
        run = serve_by(OpenLoop([request(n, at_s=n / 100) for n in range(5)]), endpoint(server), request_timeout_s=0.5)
        assert len(server.seen) == 5
    assert [record.status for record in run.requests] == [ABORTED] * 5
    assert [record.scheduled_s for record in run.requests] == [n / 100 for n in range(5)]


def test_a_cell_that_ends_leaves_requests_unfinished() -> None:
    with OpenAIServer(lambda body: Reply(TWO, end=HANG)) as server:
        load = ClosedLoop([request(number) for number in range(4)], 2)
        run = serve_by(load, endpoint(server), timeout_s=0.5)
    assert [(record.status, record.output_tokens) for record in run.requests] == [(UNFINISHED, 2)] * 2
    assert load.remaining == 2


def test_samples_have_records_of_their_own() -> None:
    choices = [{"index": i, "text": " a", "token_ids": [5] * (i + 1), "finish_reason": "length"} for i in (1, 0)]
    reply = Reply(*(event({"choices": [choice]}) for choice in choices), usage(3), DONE)
    with OpenAIServer(lambda body: reply) as server:
        sampled = Request(0, (1, 2, 3), 9, 4, n=2, sampling=Sampling(temperature=0.5, seed=3))
        run = serve_by(ClosedLoop([sampled], 1), endpoint(server), save_tokens=True)
        assert (server.seen[0]["n"], server.seen[0]["seed"]) == (2, 3)
    found = [(one.sample, one.output_tokens, one.output_token_ids) for one in run.requests]
    assert found == [(0, 1, [5]), (1, 2, [5, 5])]


def counted(server: OpenAIServer) -> str:
    """Behind a megabyte of other things: it comes in many pieces."""
    labels = '{engine="0",model_name="m"}'
    told = {
        "num_requests_running": 2.0,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": len(server.seen),
        "prompt_tokens_total": server.input,
        "generation_tokens_total": server.output,
    }
    lines = [f"vllm:{name}{labels} {value}" for name, value in told.items()]
    return "# HELP something else\n" * 50_000 + "\n".join(lines) + "\n"


def test_the_servers_own_counters_are_sampled_and_compared() -> None:
    with OpenAIServer(metrics=counted) as server:
        run = serve_by(ClosedLoop([request(number) for number in range(6)], 2), endpoint(server))
    assert (run.server_input_tokens, run.server_output_tokens) == (18, 24)
    assert [(sample.running, sample.kv_cache_usage) for sample in run.samples] == [(2, 0.25)] * len(run.samples)
    row = summarise(run)
    assert (row["counters_input_tokens"], row["counters_output_tokens"]) == (0, 0)


def test_counters_that_differ_are_told() -> None:
    def more(server: OpenAIServer) -> str:
        return f"vllm:generation_tokens_total {server.output * 2}\n"

    with OpenAIServer(metrics=more) as server:
        row = summarise(serve_by(ClosedLoop([request(0), request(1)], 1), endpoint(server)))
    assert (row["counters_input_tokens"], row["counters_output_tokens"]) == (None, 8)


def test_ctrl_c_ends_a_run_that_waits() -> None:
    """It comes once the request is there: before, the collection of garbage could swallow it in a finaliser."""

    def hang(body: Mapping[str, Any]) -> Reply:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return Reply(TWO, end=HANG)

    with OpenAIServer(hang) as server, pytest.raises(KeyboardInterrupt):
        serve_by(ClosedLoop([request(0)], 1), endpoint(server))


def test_a_fault_of_ours_is_no_fault_of_the_servers() -> None:
    """It ends the run instead of a request."""

    class Broken(ClosedLoop):
        def on_done(self, record: RequestRecord, now_s: float) -> None:
            raise ZeroDivisionError

    with OpenAIServer() as server, pytest.raises(ZeroDivisionError):
        serve_by(Broken([request(0), request(1)], 1), endpoint(server))


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/some/path/v1", "https://h/some/path"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses(text: str, base: str) -> None:
    assert base_url(text) == base


BAD_HOSTS = ["http://a..b", "http://.", f"http://{'a' * 70}.com", "http://h h:80", "http://[::1"]


@pytest.mark.parametrize(
    "text", ["", "h:8000", "ftp://h", "http://", "http://h:99999", "http://h:0", "http://h:x", *BAD_HOSTS]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(KvbenchError, match="--target must be an address"):
        base_url(text)


@pytest.mark.parametrize("text", ["http://me:s3cret@h", "http://h?key=s3cret", "http://s3cret@h:1/#x"])
def test_an_address_carries_no_secret(text: str) -> None:
    with pytest.raises(KvbenchError, match="KVBENCH_API_KEY") as caught:
        base_url(text)
    assert "s3cret" not in str(caught.value)


def lengths_refused(body: Body) -> Reply:
    if "ignore_eos" in body or "return_token_ids" in body:
        return Reply(b"unknown field", status="400 Bad Request", kind="text/plain")
    return whole(body)


def text_only(body: Body) -> Reply:
    if not isinstance(body["prompt"], str):
        return Reply(b"prompt must be a string", status="400 Bad Request", kind="text/plain")
    return whole(body)


def plain(body: Body) -> Reply:
    known = {"model", "prompt", "max_tokens", "temperature", "stream"}
    return whole(body) if set(body) <= known else Reply(b"unknown", status="422 No", kind="text/plain")


def test_the_most_telling_way_that_a_server_takes_is_found() -> None:
    def found(script: object, **more: object) -> tuple[bool, bool, bool, bool]:
        with OpenAIServer(script) as server:  # type: ignore[arg-type]
            way = connect(server.url, "completions", request(0), decode=lambda ids: "a b c").way
        return way.ids, way.lengths, way.usage, way.every_chunk

    assert found(whole) == (True, True, True, True)
    assert found(lengths_refused) == (True, False, True, False)
    assert found(text_only) == (False, True, True, True)
    assert found(plain) == (True, False, False, False)


def test_a_chat_goes_as_text() -> None:
    def chat(body: Body) -> Reply:
        assert body["messages"] == [{"role": "user", "content": "hello there"}]
        pieces = [{"index": 0, "delta": delta} for delta in ({"role": "assistant"}, {"content": "a"}, {"content": "b"})]
        pieces[-1]["finish_reason"] = "length"
        return Reply(*(event({"choices": [piece]}) for piece in pieces), usage(2, 11), DONE)

    with OpenAIServer(chat) as server:
        found = connect(server.url, "chat", request(0), decode=lambda ids: "hello there")
        assert not found.way.ids and server.seen[0]["path"] == "/v1/chat/completions"
        run = serve_by(ClosedLoop([request(0)], 1), found)
    (record,) = run.requests
    assert (record.input_tokens, record.asked_tokens, record.output_tokens, record.empty_chunks) == (11, 3, 2, 0)


def refusal(server: OpenAIServer | str) -> str:
    url = server if isinstance(server, str) else server.url
    with pytest.raises(KvbenchError) as caught:
        connect(url, "completions", request(0))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_server_is_one_clear_line() -> None:
    with OpenAIServer() as server:
        pass
    assert "no server answers at --target" in refusal(server)
    with OpenAIServer(models=("a", "b")) as server:
        assert "lists 2 models (a, b); name one: --served-model-name" in refusal(server)
        assert connect(server.url, "completions", request(0), model="b").model == "b"
    with OpenAIServer(models=()) as server:
        assert "lists 0 models (none)" in refusal(server)
    with OpenAIServer(model_status="404 Not Found") as server:
        assert "is no OpenAI-compatible server: GET /v1/models gave http 404" in refusal(server)
    with OpenAIServer(model_status="401 Unauthorized") as server:
        assert "wants an API key; put it into KVBENCH_API_KEY" in refusal(server)
    with OpenAIServer(lambda body: Reply(b"gone", status="404 Not Found", kind="text/plain")) as server:
        assert "/v1/completions does not answer a first request: http 404: gone" in refusal(server)
    with OpenAIServer(text_only) as server:
        assert "give a --model that has a tokenizer" in refusal(server)


def test_the_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("KVBENCH_API_KEY", " sk-very-secret ")
    with OpenAIServer() as server:
        found = connect(server.url, "completions", request(0))
        assert set(server.keys) == {"Bearer sk-very-secret"}
        server.script = lambda body: Reply(b"bad key sk-very-secret, sk-very-sec", status="401 No", kind="text/plain")
        run = serve_by(ClosedLoop([request(0)], 1), found)
        told = f"{run} {found} {found.facts()} {refusal(server)}"
    assert run.requests[0].reason == "http 401: bad key (key), (key)"
    assert "secret" not in told


def test_a_server_that_says_the_key_in_good_words_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_API_KEY", "sk-very-secret")
    names = ("for sk-very-secret",)
    with OpenAIServer(lambda _: Reply(chunk("a", ids=[5], finish="sk-very-secret"), DONE), models=names) as server:
        found = connect(server.url, "completions", request(0))
        run = serve_by(ClosedLoop([request(0)], 1), found)
        assert (found.facts()["model"], run.requests[0].status, run.requests[0].reason) == (
            "for (key)", FINISHED, "(key)")  # fmt: skip
        server.models = ("a", "sk-very-secret")
        assert "lists 2 models (a, (key))" in refusal(server)


def test_a_key_that_no_header_carries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_API_KEY", "two\nlines")
    assert refusal("http://127.0.0.1:1").startswith("KVBENCH_API_KEY holds characters")


def test_tls_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ssl

    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: no certificate can be made")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with OpenAIServer(tls=context) as server:
        assert "tls: " in refusal(server)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
        assert connect(server.url, "completions", request(0)).model == "served"


def test_a_request_that_the_load_held_back_was_not_late_by_the_client() -> None:
    """With a cap of one the second is scheduled at 0 and let go when the first one has ended."""
    with OpenAIServer() as server:
        run = serve_by(OpenLoop([request(0), request(1)], 1), endpoint(server))
    first, second = run.requests
    assert (second.scheduled_s, first.scheduled_s, first.due_s) == (0.0, 0.0, 0.0)
    assert second.due_s is not None and first.last_s is not None and second.sent_s >= second.due_s >= first.last_s
    row = summarise(run)
    assert row["client_lag_p99_s"] == pytest.approx(
        0.99 * max(late := [one.sent_s - (one.due_s or 0.0) for one in run.requests]) + 0.01 * min(late)
    )
