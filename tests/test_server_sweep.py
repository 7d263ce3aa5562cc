"""A server beside the backends from the command line: one table, one page, and no end but a clear one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai_server import HANG, Body, OpenAIServer, Reply, chunk, usage, whole
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

import kvbench.metrics.store as store
from kvbench.cli.app import main
from kvbench.engine.weights import quiet
from kvbench.metrics.store import RunFolder
from kvbench.reports.context import checks
from kvbench.reports.groups import Results
from kvbench.reports.sign import GOOD

TINY = ("--model", "tiny", "--dtype", "float32", "--input-len", "12", "--output-len", "8")
QUICK = (*TINY, "--concurrency", "3", "--repeats", "1", "--num-warmups", "1")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*args: str, code: int = 0) -> RunFolder:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--output", "out", *args])
    assert (ended.value.code or 0) == code
    return RunFolder.open("out")


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line with which a sweep is refused before anything is written."""
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--output", "out", *args])
    said = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and not Path("out").exists()
    return said[-1]


def counted(server: OpenAIServer) -> str:
    return (
        f"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"
        f"vllm:prompt_tokens_total {server.input}\nvllm:generation_tokens_total {server.output}\n"
    )


def test_a_server_is_a_further_column_of_one_table_and_one_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_API_KEY", "sk-very-secret")
    with OpenAIServer(metrics=counted) as server:
        folder = sweep(*TINY, "--concurrency", "2,5", "--repeats", "2", "--target", server.url)
        assert set(server.keys) == {"Bearer sk-very-secret"}
    shown = capsys.readouterr()
    rows = [row for row in folder.rows() if row["backend"] == "server"]
    assert len(folder.rows()) == 12 and len(rows) == 4 and {row["status"] for row in folder.rows()} == {"ok"}
    order = [cell["backend"] for cell in folder.manifest["cells"]]
    assert order == ["contiguous", "paged", "server"] * 2 + ["server", "paged", "contiguous"] * 2
    for row in rows:
        run, twin = folder.run(row["cell"]), folder.run(row["cell"].replace("server", "paged"))
        assert [one.input_tokens for one in run.requests] == [one.input_tokens for one in twin.requests]
        assert [one.output_tokens for one in run.requests] == [one.output_tokens for one in twin.requests]
        assert (row["counters_input_tokens"], row["counters_output_tokens"]) == (0, 0)
        assert row["kv_utilisation_mean"] is None and row["dtype"] is None and row["device"] is None
    assert "Server\n" in shown.out and "lag" in shown.out and "Paged" in shown.out
    page = (folder.path / "report.html").read_text()
    assert "Server" in page and f"server served (test) at {server.url}" in page and "could not be drawn" not in page
    facts = folder.manifest["server"]
    assert facts["model"] == "served" and facts["prompts_as"] == "token ids" and facts["counters"]
    told = "".join(path.read_text(errors="replace") for path in Path("out").rglob("*") if path.is_file())
    assert "very-secret" not in told + shown.out + shown.err
    texts = {check.text for check in checks(folder, Results.of(folder)) if check.kind == GOOD}
    assert "the server's own counters of tokens agree with its answers" in texts


def test_a_server_that_hangs_at_once_is_not_waited_for_longer_than_was_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvbench.cli.server.COLD_S", 0.1)
    with OpenAIServer(lambda _: Reply(end=HANG)) as server:
        said = refusal(capsys, *QUICK, "--target", server.url, "--backend", "server", "--request-timeout", "200ms")
    assert "does not answer a first request: timeout: no whole answer in 0.2 s" in said


def test_a_server_alone_needs_no_model_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a shape that fits this machine."""
    with OpenAIServer() as server:
        options = ("--backend", "server", "--target", server.url, "--concurrency", "2", "--repeats", "2")
        folder = sweep("--model", "Llama-3.1-70B", "--input-len", "12", "--output-len", "8", *options)
        assert {row["backend"] for row in folder.rows()} == {"server"}
        assert "weights" not in folder.manifest["model"] and folder.rows()[0]["model_load_s"] is None
        sweep("--model", "Llama-3.1-70B", "--input-len", "12", "--output-len", "8", *options, "--resume")


def test_a_server_that_dies_fails_its_cells_and_the_sweep_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenAIServer() as server:
        write_cell = store.RunFolder.write_cell

        def dies_after_its_first_cell(folder: RunFolder, name: str, *rest: object) -> None:
            write_cell(folder, name, *rest)  # type: ignore[arg-type]
            if name.startswith("server"):
                server.stop()

        monkeypatch.setattr(store.RunFolder, "write_cell", dies_after_its_first_cell)
        folder = sweep(*TINY, "--concurrency", "2", "--repeats", "2", "--target", server.url)
    of_server = [row for row in folder.rows() if row["backend"] == "server"]
    assert [row["status"] for row in of_server] == ["ok", "failed"]
    assert of_server[1]["reason"].startswith("no request finished; 6 of 6 like: refused: ")
    assert of_server[1]["errors_refused"] == 6
    assert {row["status"] for row in folder.rows() if row["backend"] != "server"} == {"ok"}


def test_faults_early_ends_and_lies_about_usage_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    def script(body: Body) -> Reply:
        """Of the cell's requests one each is turned away, ends early, and has another usage than its stream."""
        place = len(server.seen)
        if place == failing[0]:
            return Reply(b"busy", status="429 Too Many Requests", kind="text/plain")
        if place == failing[1]:
            return Reply(chunk(" a", ids=[1], finish="stop"), whole(body).parts[-2].replace(b": 8,", b": 1,"))
        if place == failing[2]:
            return Reply(*whole(body).parts[1:])
        return whole(body)

    failing = [10, 11, 12]  # behind the first request and the warm-up's
    with OpenAIServer(script) as server:
        folder = sweep(*QUICK, "--target", server.url, "--backend", "server", "--num-prompts", "9")
    said = " ".join(capsys.readouterr().out.split())
    (row,) = folder.rows()
    assert (row["errors_http_429"], row["requests_stopped"], row["usage_differences"]) == (1, 1, 1)
    assert row["requests_overlong"] == 0
    assert "requests to the server that failed, by kind: 1 http 429" in said
    assert "1 of 8 answers of the server ended by themselves" in said
    assert "in 1 of 8 answers of the server the stream shows other tokens than its usage" in said
    assert "no counters of tokens that are known here" in said


def test_a_server_that_tells_more_tokens_than_were_asked_for_is_not_believed_in_silence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def script(body: Body) -> Reply:
        """Eight chunks, and a usage of a thousand tokens."""
        good = whole({**body, "return_token_ids": False})
        return Reply(*good.parts[:-2], usage(1000), good.parts[-1])

    with OpenAIServer(script) as server:
        folder = sweep(*QUICK, "--target", server.url, "--backend", "server", "--num-prompts", "9")
    (row,) = folder.rows()
    assert row["requests_overlong"] == row["requests_finished"] == 9
    assert "9 of 9 answers of the server had more tokens than were asked for" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_cannot_be_a_server_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "no server answers at --target" in refusal(capsys, *QUICK, "--target", gone)
    with OpenAIServer(model_status="404 Not Found") as server:
        assert "is no OpenAI-compatible server" in refusal(capsys, *QUICK, "--target", server.url)
        assert "a chat goes as text" in refusal(capsys, *QUICK, "--target", server.url, "--endpoint-type", "chat")
    assert "--backend server needs its address" in refusal(capsys, *QUICK, "--backend", "server")
    assert "--target needs --model" in refusal(capsys, "--target", "http://h:1")
    assert "belong to a server; add --target" in refusal(capsys, *QUICK, "--endpoint-type", "chat")
    assert "--endpoint-type must be one of" in refusal(capsys, *QUICK, "--target", "http://h:1", "--endpoint-type", "x")
    secret = refusal(capsys, *QUICK, "--target", "http://me:s3cret@h:1")
    assert "takes no user, password or query" in secret and "s3cret" not in secret


def test_a_slow_client_is_named() -> None:
    """vllm#39963. Hand-made rows: a send lag p99 of 20 ms beside a median TTFT of 100 ms, and beside one of 1 s."""
    for ttft_s, named in ((0.1, True), (1.0, False)):
        folder = RunFolder.create(f"run-{ttft_s}", {})
        row = {"backend": "server", "concurrency": 2, "repeat": 0, "seed": 0, "status": "ok", "window": "total"}
        numbers = {
            "ttft_p50_s": ttft_s,
            "send_lag_p99_s": 0.9,
            "client_lag_p99_s": 0.02,
            "output_tokens_per_s": 9.0,
            "requests_submitted": 9,
        }
        folder.write_cell("server-c2-r0", {**row, **numbers})
        said = [check.text for check in checks(folder, Results.of(folder)) if "client was the limit" in check.text]
        assert bool(said) == named
        assert not named or "1 % of requests left 20.0 ms late or more (server at 2 users)" in said[0]


WORDS = 199


@pytest.fixture(scope="module")
def worded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose tokens are words, so that ids become text and the same ids again."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    quiet()
    folder = tmp_path_factory.mktemp("model") / "worded"
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    template = "{% for message in messages %}w1 {{ message.content }} {% endfor %}w2"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def transformers_serve(worded_model: Path) -> Iterator[str]:
    """transformers' own server of that model, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
    command = [sys.executable, "-c", code, "serve", str(worded_model), "--port", str(port), "--host", "127.0.0.1"]
    log = worded_model.parent / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--device", "cpu"], stdout=out, stderr=out, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + 120
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(json.load(answer)["status"] == "ok")
    except OSError:
        return False


def test_both_backends_and_transformers_own_server_make_one_table_and_one_report(
    transformers_serve: str, worded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that somebody else wrote: it takes text only, and tells its usage in the last chunk."""
    options = ("--input-len", "12", "--output-len", "8", "--range-ratio", "0.5", "--concurrency", "1,3")
    folder = sweep("--model", str(worded_model), *options, "--repeats", "2", "--target", transformers_serve)
    shown = capsys.readouterr().out
    rows = {row["cell"]: row for row in folder.rows()}
    assert len(rows) == 12 and {row["status"] for row in rows.values()} == {"ok"}
    for name, row in rows.items():
        twin = rows[name.replace("server", "paged")]
        for column in ("requests_finished", "input_tokens_total", "output_tokens_total"):
            assert row[column] == twin[column]
    of_server = [row for row in rows.values() if row["backend"] == "server"]
    lies = ("prompt_differences", "usage_missing", "usage_differences", "requests_stopped", "requests_overlong")
    assert {row[lie] for row in of_server for lie in lies} == {0}
    facts = folder.manifest["server"]
    assert facts["prompts_as"] == "text" and not facts["lengths_held"]
    assert all(f"{name}\n" in shown for name in ("Contiguous, reserving max", "Paged", "Server"))
    page = (folder.path / "report.html").read_text()
    assert "could not be drawn" not in page and page.count("Server") >= 3


def test_a_chat_with_transformers_own_server(transformers_serve: str, worded_model: Path) -> None:
    """Its template puts a word before and one behind the message."""
    options = ("--input-len", "12", "--output-len", "8", "--concurrency", "2", "--repeats", "1", "--backend", "server")
    chat = ("--target", transformers_serve, "--endpoint-type", "chat")
    folder = sweep("--model", str(worded_model), *options, *chat, "--num-prompts", "4")
    (row,) = folder.rows()
    run = folder.run(row["cell"])
    assert [(one.input_tokens, one.asked_tokens, one.output_tokens) for one in run.requests] == [(14, 12, 8)] * 4
    assert row["prompt_differences"] == 4


def test_a_conversation_goes_on_from_the_servers_own_answers(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*TINY, "--backend", "server", "--turns", "2", "--concurrency", "2", "--repeats", "1")
    with OpenAIServer() as server:
        folder = sweep(*options, "--target", server.url, "--num-prompts", "8")
        (row,) = folder.rows()
        later = [one for one in folder.run(row["cell"]).requests if one.turn]
        assert (row["requests_finished"], len(later)) == (8, 4)
        prompts = [body["prompt"] for body in server.seen]
        assert sum(prompt[12:20] == [5] * 8 for prompt in prompts) == 4  # what the server answered, in the middle
    with OpenAIServer(lambda body: whole({**body, "return_token_ids": False})) as silent:
        refused = ("--target", silent.url, "--output", "other")
        with pytest.raises(SystemExit):
            main(["sweep", *options, *refused])
        assert "--turns goes on from the tokens of each answer" in capsys.readouterr().err
