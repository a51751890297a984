"""Samples as lines: which tokens are targets."""

import ast
import json

from chats import CHATML, IGNORED, tokenizer_with, turns
from test_data import letter_tokenizer, prepared

from hf_ga.finetuning.data.showing import WIDTH, sample_lines, split_at_targets


def chats(folder, *rows):
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    file = str(folder / "d.jsonl")
    return prepared(file, tokenizer_with(CHATML), max_length=512, validation_file=file)


def test_parts_by_hand():
    """a 3, b 4, ...: the first token is no target, whatever its label."""
    tokenizer = letter_tokenizer()
    sample = {"input_ids": [3, 4, 5, 6, 1], "labels": [3, IGNORED, 5, 6, IGNORED]}
    parts = [("context", "a b"), ("target", "c d"), ("context", "<eos>")]
    assert split_at_targets(sample, tokenizer) == parts
    plain = {"input_ids": [3, 4, 1]}
    assert split_at_targets(plain, tokenizer) == [("context", "a"), ("target", "b <eos>")]
    assert split_at_targets({"input_ids": [3]}, tokenizer) == [("context", "a")]


def test_the_first_sample_is_shortened(tmp_path):
    """By default. The lines are the parts of the sample, in order, and none is wider."""
    data = chats(tmp_path, turns("Hi", "Yes", "And?", "No " * 90, "So?", "Yes"), turns("a", "b"))
    (lines,) = sample_lines(data, None)
    assert lines[:3] == [
        r"context  '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'",
        r"target   'Yes<|im_end|>\n'",
        r"context  '<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n'",
    ]
    assert lines[3].startswith("target   'No No No")
    assert " ... " in lines[3]
    assert lines[3].endswith(r"No <|im_end|>\n'")
    assert lines[4:] == ["... 2 more parts"]
    assert max(map(len, lines)) <= WIDTH + 9


def test_samples_in_full(tmp_path):
    """Joined, the lines are the texts of the samples."""
    rows = [turns("Hi", "Yes", "And?", "No " * 90), turns("a", "b"), turns("c", "d")]
    data = chats(tmp_path, *rows)
    samples = sample_lines(data, 2)
    assert len(samples) == 2
    for lines, row in zip(samples, rows, strict=False):
        parts = "".join(("\n" if line[0] != " " else "") + line[9:] for line in lines).split("\n")
        text = "".join(ast.literal_eval(part) for part in parts[1:])
        assert text == data.tokenizer.apply_chat_template(row, tokenize=False)
        assert max(map(len, lines)) <= WIDTH + 9
    assert [line.split()[0] for line in samples[1]] == ["context", "target"]
    assert sample_lines(data, 0) == []
    assert len(sample_lines(data, 99)) == 3


def test_plain_text_and_other_tasks(tmp_path):
    rows = ({"text": "a b c", "label": i % 2} for i in range(9))
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = str(tmp_path / "d.jsonl")
    assert sample_lines(prepared(file), None) == [["context  'a'", "target   'b c <eos>'"]]
    classes = prepared(file, task="text-classification", validation_file=file)
    assert sample_lines(classes, None) == []
