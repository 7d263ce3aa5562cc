"""What fits into a card, for people: a sentence, the sum term by term, users at once by context length; for programs as
it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.reports.plain import Lines, as_markdown, as_text, wrapped
from kvbench.reports.words import DASH, THIN, binary_size, count, listing, number, plain, times

Facts = Mapping[str, Any]


def render(cards: Sequence[Facts], fmt: str, width: int = 100) -> str:
    """The facts of one card or several as `table`, `markdown`, `csv` or `json`: one object, or a list of several."""
    if fmt == "json":
        return json.dumps(cards[0] if len(cards) == 1 else list(cards), indent=2, allow_nan=False) + "\n"
    if fmt == "csv":
        from kvbench.reports.tables import to_csv

        return to_csv([row for facts in cards for row in _rows(facts)])
    markdown = fmt == "markdown"
    draw, title = (as_markdown, "### {}\n\n") if markdown else (as_text, "{}\n")
    blocks = []
    for facts in cards:
        name = _fleet(facts)
        blocks += [
            f"{sentence(facts)}\n" if markdown else wrapped(sentence(facts), width),
            title.format(f"Where the memory of {'each' if facts['tp'] > 1 else 'the'} card goes: {name}")
            + draw(_terms(facts), (0, 3, 4)),
            title.format(f"Users at once by context length: {name}") + draw(_users(facts), ())
            if facts["pool_tokens"]
            else "",
            "".join(f"- {note}\n" if markdown else wrapped(note, width, "- ") for note in _notes(facts)),
        ]
    if len(cards) > 1:
        blocks.append(title.format("Beside each other") + draw(_beside(cards), (0,)))
    return "\n".join(filter(None, blocks))


def sentence(facts: Facts) -> str:
    """What a reader takes away."""
    model = f"{facts['model']} in {facts['dtype']}"
    if not facts["pool_tokens"]:
        enough, cure = facts["enough"], "no number of them that can share it holds it"
        if enough:
            cure = f"--tp {enough['tp']} does, with {count(enough['pool_tokens'], 'token')} of keys and values"
        short = binary_size(facts["missing_bytes"]) if facts["missing_bytes"] else "a block of keys and values"
        return f"{model} does not fit on {_fleet(facts)}: {short} is missing on each card; {cure}."
    ratio, label = _contest(facts)
    users = facts["max_concurrency"]
    contiguous, paged = users["contiguous"][label], users["paged"][label]
    each = " on each" if facts["tp"] > 1 else ""
    more = f" ({times(ratio, 1)} as many)" if ratio and ratio > 1 else ""
    found = (
        f"{model} on {_fleet(facts)} leaves {binary_size(facts['pool_bytes'])}{each} for keys and values: "
        f"{count(facts['pool_tokens'], 'token')} at {binary_size(facts['kv_bytes_per_token'])} each. With "
        f"{_words(label)} tokens a user paged holds {count(paged, 'user')} at once{more}, contiguous slots of "
        f"{number(facts['max_model_len'])} tokens hold {number(contiguous) if contiguous else 'none'}."
    )
    return found.replace(THIN, " ")


def _contest(facts: Facts) -> tuple[float | None, str]:
    """The middle context, and how many times as many users paged holds there."""
    labels = [context["context"] for context in facts["contexts"]]
    label = labels[(len(labels) - 1) // 2]
    contiguous = facts["max_concurrency"]["contiguous"][label]
    return (facts["max_concurrency"]["paged"][label] / contiguous if contiguous else None), label


def _words(label: str) -> str:
    return " + ".join(number(int(part)) for part in label.split("+"))


def _fleet(facts: Facts) -> str:
    return f"{facts['tp']} x {facts['gpu_name']}" if facts["tp"] > 1 else f"one {facts['gpu_name']}"


def _terms(facts: Facts) -> Lines:
    lines = [["term", "GiB", "bytes", "figure", "of what"]]
    for term in facts["terms"]:
        words, of_what = _words_of(term, facts)
        lines.append([words, _gib(term["bytes"]), number(term["bytes"]), term["evidence"], of_what])
    blocks = f"{number(facts['pool_tokens'])} tokens in blocks of {facts['block_size']} x {_per_token(facts)}"
    lines.append(["= KV pool", _gib(facts["pool_bytes"]), number(facts["pool_bytes"]), "reckoned", blocks])
    return lines


def _words_of(term: Mapping[str, Any], facts: Facts) -> tuple[str, str]:
    """What a term is called, and what its figure is made of."""
    share, memory = facts["gpu_memory_utilization"] * 100, _gib(facts["card"]["memory_bytes"])
    users, batch, vocab = facts["max_num_seqs"], facts["max_num_batched_tokens"], facts["shape"]["vocab"]
    peak = f"{number(min(users, batch))} x {number(vocab)} logits"
    if term["note"] == "layer":
        peak = f"a layer of {count(batch, 'token')}"
    return {
        "budget": (f"{plain(share)}% of the card's {memory} GiB", term["note"].removeprefix("estimated: ")),
        "weights": ("- weights", _weights(facts)),
        "rotary": ("- rotary table", "positions x rotary width, as vLLM's"),
        "padding": ("- padding of quantised experts", "hidden size up to the kernels' multiple"),
        "activation": ("- activation peak", peak),
        "outside": ("- outside torch", "driver and libraries, measured on an H100"),
        "graphs": ("- CUDA graphs", "--graph-memory" if term["bytes"] else "captured into what the budget leaves"),
    }[term["key"]]


def _weights(facts: Facts) -> str:
    shape = facts["shape"]
    words = f"{number(facts['parameters'])} parameters in {facts['dtype']}"
    if shape["quantised_parts"]:
        bits = f"{shape['quantised_bits']:.4g} bits"
        words += f", {listing(shape['quantised_parts'])} in {shape['quantisation']} ({bits})"
    return words + (f", one of {facts['tp']} shares" if facts["tp"] > 1 else "")


def _per_token(facts: Facts) -> str:
    shape = facts["shape"]
    values = f"{shape['latent']} of a latent" if shape["latent"] else f"2 x {shape['kv_heads']} x {shape['head_dim']}"
    return f"{number(facts['kv_bytes_per_token'])} B ({shape['layers']} layers x {values} x {shape['kv_itemsize']} B)"


def _users(facts: Facts) -> Lines:
    users = facts["max_concurrency"]
    names = [f"{name} max" if name == "contiguous" else name for name in users]
    lines = [["context", "input", "output", *names]]
    for context in facts["contexts"]:
        lengths = [context["input_tokens"], context["output_tokens"]]
        cells = [sum(lengths), *lengths, *(column[context["context"]] for column in users.values())]
        lines.append([number(cell) for cell in cells])
    longest = facts["longest_context_tokens"]
    if longest:
        lines.append(["longest", "alone", "", *(number(longest.get(name)) for name in users)])
    return lines


def _notes(facts: Facts) -> list[str]:
    """What the numbers leave out, and what they rest on."""
    users, shape = facts["max_concurrency"], facts["shape"]
    most = max((value for column in users.values() for value in column.values()), default=0)
    notes = [
        f"contiguous max: slots of {number(facts['max_model_len'])} tokens (--max-model-len); declared, pow2, oracle: "
        "powers of two; paged: all users at their last token, the worst moment. Nothing is shared."
    ]
    if facts["tp"] not in shape["even_tp"]:
        even = ", ".join(map(str, shape["even_tp"]))
        notes.append(
            f"{count(shape['heads'], 'head')} over {facts['tp']} cards go unevenly: the fullest card is shown; an "
            f"engine may refuse this and take {even} cards"
        )
    if most > facts["max_num_seqs"]:
        notes.append(f"beyond {number(facts['max_num_seqs'])} users --max-num-seqs is the limit, not memory")
    if shape["sliding_layers"]:
        notes.append(
            f"paged windowed is what a layout could reach whose {shape['sliding_layers']} sliding layers keep no more "
            f"than their {number(shape['sliding_window'])} tokens; the engine here keeps every token on every layer"
        )
    notes.append(
        f"activation peak: {number(facts['max_num_batched_tokens'])} tokens a step (--max-num-batched-tokens), "
        f"{number(facts['max_num_seqs'])} users (--max-num-seqs); checked against vLLM's logs on an H100 only"
    )
    notes.append(f"dimensions of the model: {shape['source']}")
    if facts["usd_per_hour_low"] is not None:
        dated = ", ".join(filter(None, (facts["card"]["price_source"], facts["card"]["price_as_of"])))
        notes.append(f"{_fleet(facts)} for {_price(facts)} an hour ({dated})")
    if facts["card"]["note"]:
        notes.append(f"of the card: {facts['card']['note']}")
    return notes


def _price(facts: Facts) -> str:
    low, high = facts["usd_per_hour_low"], facts["usd_per_hour_high"]
    ends = [number(low, 2)] if low == high else [number(low, 2), number(high, 2)]
    return f"${' to $'.join(ends)}"


def _beside(cards: Sequence[Facts]) -> Lines:
    """A column per card."""
    lines = [["", *(_fleet(facts) for facts in cards)]]
    lines.append(["KV pool, GiB a card", *(_gib(facts["pool_bytes"]) for facts in cards)])
    lines.append(["tokens", *(number(facts["pool_tokens"]) for facts in cards)])
    for way in ("contiguous", "paged"):
        lines.append([f"longest context, {way}", *(number(f["longest_context_tokens"].get(way)) for f in cards)])
    labels = dict.fromkeys(label for facts in cards for label in facts["max_concurrency"]["paged"])
    for label in labels:
        cells = [number(facts["max_concurrency"]["paged"].get(label)) for facts in cards]
        lines.append([f"paged users at {_words(label)} tokens", *cells])
    prices = [_price(facts) if facts["usd_per_hour_low"] is not None else DASH for facts in cards]
    return [*lines, ["price an hour", *prices]]


def _gib(size_bytes: int) -> str:
    return number(size_bytes / 2**30, 2)


def _rows(facts: Facts) -> list[dict[str, Any]]:
    """A flat row for each context and way to hold it."""
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict | list)}
    terms = {f"{term['key']}_bytes": term["bytes"] for term in facts["terms"]} | {
        "weights_bytes": facts["weights_bytes"]
    }
    return [
        {**plain, **terms, **context, "way": name, "max_concurrency": column[context["context"]],
         "longest_context_tokens": facts["longest_context_tokens"].get(name)}
        for name, column in facts["max_concurrency"].items()
        for context in facts["contexts"]
    ]  # fmt: skip
