"""Which tokens of a sample that is too long go, on either side, and which targets remain: all by
hand. In the letters' tokenizer a to j are 3 to 12; <eos> 1, <cls> 13, <sep> 14.
"""

import pytest
from test_data import letter_tokenizer, prepared, write
from test_tokenization import encoder_tokenizer, piece_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from hf_ga import ConfigError
from hf_ga.finetuning.data.encoding.tokenization import (
    complete_tokenizer,
    tokenize_causal,
    tokenize_targets,
    tokenize_texts,
    tokenize_words,
)

NO = -100


def sided(tokenizer, side):
    tokenizer.truncation_side = side
    return tokenizer


def beginning() -> object:
    """Letters after a begin-of-text token, 13, as Llama's."""
    tokenizer = letter_tokenizer(bos_token="<cls>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<cls> $A", pair=None, special_tokens=[("<cls>", 13)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("side", "plain", "with_begin"),
    [("right", [3, 4, 5, 6], [13, 3, 4, 5]), ("left", [5, 6, 7, 1], [13, 6, 7, 1])],
)
def test_texts(side, plain, with_begin):
    """a b c d e <eos>: from the left the end stays, and so does a begin-of-text token."""
    for tokenizer, ids in ((letter_tokenizer(), plain), (beginning(), with_begin)):
        columns = tokenize_causal({"text": ["a b c d e"]}, sided(tokenizer, side), 4)
        assert columns["input_ids"] == [ids]
        assert (columns["num_targets"], columns["was_truncated"]) == ([3], [True])


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_that_fit_are_whole(side):
    for text, ids in (("a b c", [13, 3, 4, 5, 1]), ("", [])):
        columns = tokenize_causal({"text": [text]}, sided(beginning(), side), 5)
        assert (columns["input_ids"], columns["was_truncated"]) == ([ids], [False])


COMPLETION = {"prompt": ["a b c"], "completion": [" d e f"]}


@pytest.mark.parametrize(
    ("side", "max_length", "ids", "labels", "num_targets"),
    [
        ("right", 5, [3, 4, 5, 6, 7], [NO, NO, NO, 6, 7], 2),
        ("right", 3, [3, 4, 5], [NO, NO, NO], 0),
        ("left", 5, [5, 6, 7, 8, 1], [NO, 6, 7, 8, 1], 4),
        # Nothing is before the first token that is left, so it is not predicted.
        ("left", 3, [7, 8, 1], [7, 8, 1], 2),
    ],
)
def test_completions(side, max_length, ids, labels, num_targets):
    """a b c is asked, d e f <eos> is the answer: 3 4 5, 6 7 8 1."""
    columns = tokenize_causal(COMPLETION, sided(letter_tokenizer(), side), max_length)
    assert (columns["input_ids"], columns["labels"]) == ([ids], [labels])
    assert (columns["num_targets"], columns["was_truncated"]) == ([num_targets], [True])


def test_a_completion_keeps_the_begin_of_text():
    columns = tokenize_causal(COMPLETION, sided(beginning(), "left"), 4)
    assert (columns["input_ids"], columns["labels"]) == ([[13, 7, 8, 1]], [[NO, 7, 8, 1]])
    assert columns["num_targets"] == [3]


def test_a_template_keeps_its_begin_of_text():
    """The template writes it, not the tokenizer."""
    tokenizer = sided(beginning(), "left")
    tokenizer.chat_template = (
        "<cls> {% for m in messages %}{% if m.role == 'user' %}a {{ m.content }} b "
        "{% else %}{{ m.content }} <eos>{% endif %}{% endfor %}"
    )
    turns = [{"role": "user", "content": "c d"}, {"role": "assistant", "content": "e f"}]
    whole = tokenize_causal({"messages": [turns]}, tokenizer, None)
    assert whole["input_ids"] == [[13, 3, 5, 6, 4, 7, 8, 1]]
    columns = tokenize_causal({"messages": [turns]}, tokenizer, 5)
    assert (columns["input_ids"], columns["labels"]) == ([[13, 4, 7, 8, 1]], [[NO, NO, 7, 8, 1]])


@pytest.mark.parametrize("adds_end", [True, False])
@pytest.mark.parametrize(
    ("side", "source", "target"), [("right", [3, 4], [8, 9]), ("left", [5, 6], [10, 11])]
)
def test_sources_and_targets(side, source, target, adds_end):
    """a b c d and f g h i, whose end token 1 stays; the target has its own length."""
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    if adds_end:
        complete_tokenizer(tokenizer, "encoder-decoder")
    rows = {"text": ["a b c d"], "target": ["f g h i"]}
    columns = tokenize_targets(
        rows, sided(tokenizer, side), 3 if adds_end else 2, max_target_length=3
    )
    assert columns["input_ids"] == [[*source, 1] if adds_end else source]
    assert (columns["labels"], columns["num_targets"]) == ([[*target, 1]], [3])
    assert columns["target"] == ["f g h i"]
    assert columns["was_truncated"] == [True]


@pytest.mark.parametrize(
    ("side", "ids"), [("right", [13, 3, 4, 14, 6, 14]), ("left", [13, 4, 5, 14, 6, 14])]
)
def test_pairs(side, ids):
    """a b c with d in 6 tokens: the longer text loses one."""
    rows = {"text": ["a b c"], "text_pair": ["d"]}
    columns = tokenize_texts(rows, sided(encoder_tokenizer(), side), 6)
    assert (columns["input_ids"], columns["token_type_ids"]) == ([ids], [[0, 0, 0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("side", "pieces", "tags"),
    [
        ("right", ["<cls>", "ab", "##c", "<sep>"], [NO, 0, NO, NO]),
        # The rest of the second word is left: its first piece had the tag, so it has none.
        ("left", ["<cls>", "##d", "c", "<sep>"], [NO, NO, 2, NO]),
    ],
)
def test_words(side, pieces, tags):
    """abc | cd | c with tags 0, 1, 2 are ab ##c c ##d c, of which two fit."""
    rows = {"tokens": [["abc", "cd", "c"]], "label": [[0, 1, 2]]}
    tokenizer = sided(piece_tokenizer(), side)
    columns = tokenize_words(rows, tokenizer, 4)
    assert tokenizer.convert_ids_to_tokens(columns["input_ids"][0]) == pieces
    assert (columns["label"], columns["num_targets"]) == ([tags], [1])
    assert tokenize_words(rows, tokenizer, 5)["num_targets"] == [2]


def test_the_option_is_the_tokenizers_side(tmp_path):
    """Given or the tokenizer's own; printed, and saved for whoever loads the model."""
    file = write(tmp_path / "d.jsonl", [{"text": "a b c d e"}] * 20)
    more = {"validation_file": file, "max_length": 4}
    kept = {}
    for own, given in (("right", None), ("left", None), ("right", "left"), ("left", "right")):
        tokenizer = letter_tokenizer(truncation_side=own)
        data = prepared(file, tokenizer, truncation_side=given, **more)
        kept[own, given] = data.splits["train"]["input_ids"][0]
        what = "truncated to 4 tokens" + " from the left" * ((given or own) == "left")
        assert f"train: 20 of 20 rows {what}" in data.notes
        tokenizer.save_pretrained(tmp_path / "saved")
        assert AutoTokenizer.from_pretrained(tmp_path / "saved").truncation_side == (given or own)
    first = [3, 4, 5, 6]
    last = [5, 6, 7, 1]
    assert [*kept.values()] == [first, last, last, first]


def test_a_prefix_is_not_truncated(tmp_path):
    rows = [{"source": "a b c", "target": "d"}] * 20
    file = write(tmp_path / "d.jsonl", rows)
    more = {"task": "seq2seq", "validation_file": file, "source_prefix": "j "}
    with pytest.raises(ConfigError, match=r"remove source_prefix 'j ' from long sources"):
        prepared(file, truncation_side="left", **more)
    assert prepared(file, truncation_side="right", **more).splits["train"]["input_ids"][0][0] == 12
