"""Files with something wrong, the arguments to try them with, and what the error must look like."""

import json
from pathlib import Path

VALID = "--num_train_epochs 1 --per_device_train_batch_size 4 --max_length 32"
CLASSIFY = "--task text-classification"
ANSWER = "--task question-answering"
CHOOSE = "--task multiple-choice"
WRITE = "--task seq2seq"


def rows(*values: dict) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def asked(context: str, text: str, start: int, question: str = "what?") -> dict:
    return {
        "question": question,
        "context": context,
        "answers": {"text": [text], "answer_start": [start]},
    }


FILES = {
    "good.jsonl": rows(*({"text": f"word {i} " * (1 + i % 5), "label": i % 2} for i in range(20))),
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "header.csv": "text,label\n",
    "fields.csv": "text,label\nhello, you,1\nbye, you,0\n",
    "nested.json": json.dumps({"version": "1", "data": [{"text": "a"}, {"text": "b"}]}),
    "keys.json": json.dumps({"a": [{"text": "a"}], "b": [{"text": "b"}]}),
    "pointer.parquet": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "no_text.jsonl": rows({"body": "a b", "title": "c"}, {"body": "d e", "title": "f"}),
    "blank_texts.jsonl": rows(*({"text": ""} for _ in range(9))),
    "one_token.jsonl": rows(*({"text": "<eos>"} for _ in range(9))),
    "one_row.jsonl": rows({"text": "a b c"}),
    "messages.jsonl": rows(*({"messages": [{"role": "user", "content": "a"}]} for _ in range(9))),
    "preferences.jsonl": rows(
        *({"prompt": "a", "completion": "b", "label": i % 2 == 0} for i in range(9))
    ),
    "answers.jsonl": rows(*(asked("some words", "words", 5) for _ in range(9))),
    "long_question.jsonl": rows(
        *(asked("some words " * 20, "words", 5, "what is " * 4) for _ in range(9))
    ),
    "choices.jsonl": rows(
        *({"question": "a", "choices": ["b", "c"], "label": i % 2} for i in range(9))
    ),
    "targets.jsonl": rows(*({"source": "a b", "target": "c"} for _ in range(9))),
    "good.xyz": "some text\n",
    "malformed.yaml": "max_steps: [3\nseed: 1\n",
    "malformed.json": '{"max_steps": 3,}',
    "list.yaml": "- max_steps\n- seed\n",
    "wrong_type.yaml": "max_steps: many\n",
    "null_in_list.yaml": "freeze: [a, null]\n",
    "float_for_int.yaml": "max_steps: 3.0\n",
    "bytes.yaml": b"seed: \xff\xfe",
    "unknown_name.yaml": "learning_rates: 0.1\n",
    "used/metrics.jsonl": '{"step": 1}\n',
    "no_weights/config.json": '{"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, '
    '"vocab_size": 300}',
    "no_folder/notes.txt": "no model here",
}


def arguments_of(text: str, folder: Path, output: Path) -> list[str]:
    """The case's own arguments, and valid ones for what it leaves out."""
    own = text.format(d=folder).split()
    defaults = {
        "--model_name_or_path": folder / "gpt",
        "--dataset_name": folder / "good.jsonl",
        "--output_dir": output,
    }
    if CLASSIFY in text or ANSWER in text or CHOOSE in text:
        defaults["--model_name_or_path"] = folder / "bert"
    for name, value in [
        *defaults.items(),
        *zip(VALID.split()[::2], VALID.split()[1::2], strict=True),
    ]:
        if not any(argument.partition("=")[0] == name for argument in own):
            own += [name, str(value)]
    return own


def assert_one_line(stderr: str, words: list[str]) -> None:
    assert stderr.startswith("error: ") and stderr.endswith("\n") and stderr.count("\n") == 1, (
        stderr
    )
    assert "Traceback" not in stderr
    for word in words:
        assert word in stderr, f"{word!r} is not in {stderr!r}"
