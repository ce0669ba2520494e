"""Which outputs a structural tag lets through, token by token, by the masks that the sampler is given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvist.engine import bundled_model_path
from kvist.engine.server.structured import GrammarCompiler, read_grammar
from kvist.openai.errors import RequestError
from kvist.openai.tokenization import ChatTokenizer

VOCAB_SIZE, END = 3072, 1
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER = {
    "type": "tag",
    "begin": "<f=weather>",
    "content": {"type": "json_schema", "json_schema": CITY},
    "end": "</f>",
}
AGE = {
    "type": "tag",
    "begin": "<f=age>",
    "content": {"type": "regex", "pattern": r"[0-9]+/\/"},
    "end": ["</f>", "</g>"],
}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [WEATHER, AGE]}
BOLD = {"type": "tag", "begin": "<b>", "content": {"type": "any_text"}, "end": "</b>"}
TURN = {"type": "tag", "begin": "<start_of_turn>[", "content": {"type": "any_text"}, "end": "<end_of_turn>]"}
OLD = {"structures": [{"begin": "<f=weather>", "schema": CITY, "end": "</f>"}], "triggers": ["<f="]}

ROME, OSLO, SEVEN = '<f=weather>{"city": "Rome"}</f>', '<f=weather>{"city":"Oslo"}</f>', "<f=age>7//</g>"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(bundled_model_path())


@pytest.fixture(scope="module")
def compiler(tokenizer: ChatTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, frozenset({END}))


@pytest.mark.parametrize(
    ("asked", "accepted", "refused"),
    [
        (OLD, ["", "what? <f", f"so {ROME} and {OSLO}."], ["<f=age", '<f=weather>{"city":"Bonn', "a <f="]),
        (CALLS, ["naïve 日本 text", f"{ROME}{SEVEN} done", "<f=age>7//</f>"], ["<f=age>x", "<f=age>7//</h>", "<f=x"]),
        (CALLS | {"at_least_one": True}, [ROME, f"{SEVEN} text {ROME}"], ["", f"text {ROME}"]),
        (CALLS | {"stop_after_first": True}, ["text", f"text {ROME}"], [f"{ROME} text", "text <f="]),
        (CALLS | {"at_least_one": True, "stop_after_first": True}, [ROME, SEVEN], ["", "text", ROME + SEVEN]),
        (BOLD, ["<b></b>", "<b> <i>x</i> </b>"], ["x", "<b>x", "<b>x</b>y", "<b></b></b>"]),
        (TURN, ["<start_of_turn>[x<end_of_turn>]"], ["<start_of_turn>x", "<start_of_turn>[<end_of_turn>"]),
        (
            {"type": "sequence", "elements": [BOLD, {"type": "const_string", "value": '"\\\n🌞 '}, CALLS]},
            [f'<b>1</b>"\\\n🌞 {ROME}', '<b></b>"\\\n🌞 text'],
            ["text", '<b></b>"\\n', f"<b></b>{ROME}"],
        ),
        ({"type": "or", "elements": [WEATHER, {"type": "const_string", "value": "no"}]}, [ROME, "no"], ["", "yes"]),
        (
            CALLS | {"triggers": ["<start_of_turn>"], "tags": [TURN]},
            ["x", "x<start_of_turn>[y<end_of_turn>]z"],
            ["<end_of_turn>"],
        ),
    ],
)
def test_an_output_is_let_through_if_the_tag_allows_it(
    asked: dict[str, Any], accepted: list[str], refused: list[str], compiler: GrammarCompiler, tokenizer: ChatTokenizer
) -> None:
    fields = asked if asked is OLD else {"format": asked}
    grammar = read_grammar({"response_format": {"type": "structural_tag", **fields}})
    assert grammar == read_grammar({"structured_outputs": {"structural_tag": grammar.text}}).__replace__(
        field=grammar.field
    )
    constraint = compiler.compile(grammar)

    def is_let_through(text: str) -> bool:
        """Return whether each token may come next, and then the end."""
        output = constraint.copy()
        for token_id in tokenizer.tokenize_text(text, add_special_tokens=False).tolist():
            if not output.allowed()[token_id]:
                return False
            output.accept(token_id)
        return bool(output.allowed()[END])

    assert [text for text in accepted if not is_let_through(text)] == []
    assert [text for text in refused if is_let_through(text)] == []


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"type": "dispatch", "rules": []}, r"Invalid value 'dispatch' - at `\$\.format\.type`"),
        (BOLD | {"content": {"type": "any_text", "max_tokens": 5}}, r"max_tokens.* - at `\$\.format\.content`"),
        (BOLD | {"content": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "qwen_xml.*style"),
        (CALLS | {"excludes": ["x"]}, r"length <= 0 - at `\$\.format\.excludes`"),
        (CALLS | {"triggers": ["<tool"]}, "begin: got '<f=weather>', expected one of the triggers"),
        (CALLS | {"tags": []}, "expected at least one of"),
        (BOLD | {"content": CALLS}, "triggered_tags: expected at the end"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, BOLD]}, "any_text: expected at the end"),
        (TURN | {"end": "]<end_of_turn>"}, "special tokens"),
        (BOLD | {"end": ""}, "expected what ends a text"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_its_place(
    wanted: dict[str, Any], named: str, compiler: GrammarCompiler
) -> None:
    grammar = read_grammar({"structured_outputs": {"structural_tag": json.dumps({"format": wanted})}})
    with pytest.raises(RequestError) as refusal:
        compiler.compile(grammar)
    assert refusal.value.param == "structured_outputs.structural_tag"
    assert re.search(named, str(refusal.value))
