"""Rows -> samples: what is a target, what is cut, what is left of an empty row; checked by hand and
by decoding.
"""

import numpy as np
import pytest
from test_data import LETTERS, ids_of, letter_tokenizer
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_ga import ConfigError
from hf_ga.finetuning.data.encoding import collation
from hf_ga.finetuning.data.encoding.choices import tokenize_choices
from hf_ga.finetuning.data.encoding.spans import tokenize_questions
from hf_ga.finetuning.data.encoding.tokenization import (
    complete_tokenizer,
    tokenize_causal,
    tokenize_masked,
    tokenize_targets,
    tokenize_texts,
    tokenize_words,
)
from hf_ga.finetuning.data.formats import corpus

IGNORED = -100
TRAINING = [
    "What is the answer? The answer is yes, or no.",
    "def f(x):\n    return x\n\n    pass",
    "Grüße aus Köln, 日本語 🎉",
] * 3


def byte_level(post_processor=None, end: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2 has it. With GPT-2's own post-processor, offsets are without the
    spaces that tokens begin with.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TRAINING, trainer)
    if post_processor is not None:
        backend.post_processor = post_processor
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", eos_token=end
    )


def bos_of(tokenizer_id: int = 2):
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer_id)]
    )


def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece-like, as Llama 2: spaces become part of the next token; unknown characters
    become bytes.
    """
    words = [
        "<pad>",
        "<eos>",
        "<s>",
        "<unk>",
        "▁",
        *(f"<0x{i:02X}>" for i in range(256)),
        *"abcdefghijklmnopqrstuvwxyzQA:?.,\n",
    ]
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("▁", "n"), ("▁n", "o"), ("▁", "▁")]
    vocabulary = {word: i for i, word in enumerate([*words, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = bos_of()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """Letters (3 to 12) between <cls> 13 and <sep> 14; a pair is `<cls> a <sep> b <sep>` with types
    0 and 1.
    """
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    complete_tokenizer(tokenizer, "encoder")
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece: `ab` is one piece, other letters stand alone; <cls> and <sep> around them; control
    characters vanish.
    """
    pieces = [
        "<pad>",
        "<cls>",
        "<sep>",
        "<unk>",
        "ab",
        *LETTERS,
        *(f"##{letter}" for letter in LETTERS),
    ]
    backend = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    special = [("<cls>", 1), ("<sep>", 2)]
    backend.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>", pair=None, special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token="<cls>",
        sep_token="<sep>",
    )


def test_causal_rows_by_hand():
    texts = ["a b", "a b <eos>", "a <eos> b", "", None, "<eos>", "a b c d"]
    out = tokenize_causal({"text": texts}, letter_tokenizer(), 4)
    assert out["input_ids"] == [[3, 4, 1], [3, 4, 1], [3, 1, 4, 1], [], [], [1], [3, 4, 5, 6]]
    assert out["length"] == [3, 3, 4, 0, 0, 1, 4]
    assert out["num_targets"] == [2, 2, 3, 0, 0, 0, 3]
    assert out["was_truncated"] == [False] * 6 + [True]
    long = " ".join(LETTERS * 20)
    out = tokenize_causal({"text": [long]}, letter_tokenizer(), None)
    assert out["input_ids"] == [[*ids_of(long), 1]]
    assert out["was_truncated"] == [False]
    assert tokenize_causal({"text": ["a b"]}, letter_tokenizer(eos_token=None), 8)["input_ids"] == [
        [3, 4]
    ]


def test_a_tokenizer_that_adds_the_end_itself_has_it_once():
    tokenizer = letter_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <eos>", pair=None, special_tokens=[("<cls>", 13), ("<eos>", 1)]
    )
    assert tokenize_causal({"text": ["a b", ""]}, tokenizer, 8)["input_ids"] == [[13, 3, 4, 1], []]
    completed = tokenize_causal({"prompt": ["a"], "completion": [" b"]}, tokenizer, 8)
    assert completed["input_ids"] == [[13, 3, 4, 1]]
    assert completed["labels"] == [[IGNORED, IGNORED, 4, 1]]


def targets_of(tokenizer, prompt, completion, max_length=None):
    """(text of the labelled ids, text of the others), and that labels are the ids or ignored."""
    out = tokenize_causal({"prompt": [prompt], "completion": [completion]}, tokenizer, max_length)
    ids = np.array(out["input_ids"][0], int)
    labels = np.array(out["labels"][0], int)
    assert len(ids) == len(labels)
    assert ((labels == ids) | (labels == IGNORED)).all()
    assert out["num_targets"] == [int((labels[1:] != IGNORED).sum())]
    return tokenizer.decode(ids[labels != IGNORED]), tokenizer.decode(
        ids[labels == IGNORED], skip_special_tokens=True
    )


TOKENIZERS = {
    "the embedded corpus's kind": lambda: corpus.train_tokenizer(TRAINING, 330),
    "offsets with spaces": lambda: byte_level(),
    "offsets without spaces": lambda: byte_level(processors.ByteLevel(trim_offsets=True)),
    "Llama 3's post-processor": lambda: byte_level(
        processors.Sequence([processors.ByteLevel(trim_offsets=True), bos_of()])
    ),
    "metaspace": metaspace,
}
# prompt, completion: the completion begins where a token begins
CLEAN = {
    "leading space": ("What is the answer?", " yes, or no."),
    "newline": ("What?\n", "yes"),
    "leading spaces of code": ("def f(x):", "\n    return x\n\n        pass\n"),
    "only spaces": ("def f(x):", "    "),
    "spaces at the end": ("What?\n", "yes   "),
    "unicode": ("Grüße aus", " Köln, 日本語 🎉"),
    "unknown characters": ("日\n", "ꙮ☃ ẞ\u0301"),
    "unicode at the border": ("日本🎉", "🎉語"),
    "empty prompt": ("", "yes, or no."),
}


@pytest.mark.parametrize("case", CLEAN)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_labels_are_the_tokens_of_the_completion(kind, case):
    tokenizer, (prompt, completion) = TOKENIZERS[kind](), CLEAN[case]
    labelled, others = targets_of(tokenizer, prompt, completion)
    # SentencePiece writes a space before the text.
    written = " " + completion if kind == "metaspace" and not prompt else completion
    assert labelled == written + "<eos>"
    assert others.strip() == prompt.strip()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_space_that_ends_the_prompt_may_begin_the_completion(kind):
    """The token of ` yes` stands across the border: it is the completion's, or else its first word
    had no target. Of an empty completion it is none.
    """
    tokenizer = TOKENIZERS[kind]()
    labelled, others = targets_of(tokenizer, "What is the answer? ", "yes, or no.")
    assert labelled.lstrip() == "yes, or no.<eos>"
    assert others.strip() == "What is the answer?"
    labelled, others = targets_of(tokenizer, "What?\n    ", "")
    assert labelled == "<eos>"
    assert others.strip() == "What?"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_cut_of_a_completion(kind):
    """A cut sample is the beginning of the whole one, labels too; a prompt that fills it leaves no
    target.
    """
    tokenizer = TOKENIZERS[kind]()
    rows = {"prompt": ["What is the answer?"], "completion": [" yes, or 日本"]}
    whole = tokenize_causal(rows, tokenizer, None)
    ids = whole["input_ids"][0]
    labels = whole["labels"][0]
    first = next(i for i, label in enumerate(labels) if label != IGNORED)
    assert whole["was_truncated"] == [False]
    assert first > 1
    for length in range(2, len(ids) + 2):
        cut = tokenize_causal(rows, tokenizer, length)
        assert cut["input_ids"] == [ids[:length]]
        assert cut["labels"] == [labels[:length]]
        assert cut["was_truncated"] == [length < len(ids)]
        assert cut["length"] == [min(length, len(ids))]
        assert cut["num_targets"] == [max(0, min(length, len(ids)) - first)]


def test_completions_by_hand():
    rows = {
        "prompt": ["a b", "a", "", "", "a <eos>"],
        "completion": [" c", "", "c", "", " b <eos>"],
    }
    out = tokenize_causal(rows, letter_tokenizer(), 8)
    assert out["input_ids"] == [[3, 4, 5, 1], [3, 1], [5, 1], [], [3, 1, 4, 1]]
    i = IGNORED
    assert out["labels"] == [[i, i, 5, 1], [i, 1], [5, 1], [], [i, i, 4, 1]]
    assert out["num_targets"] == [2, 1, 1, 0, 2]  # nothing predicts a first token
    batch = collation.collate_causal(
        [dict(zip(out, values, strict=True)) for values in zip(*out.values(), strict=True)][:3], 0
    )
    assert batch["input_ids"].tolist() == [[3, 4, 5, 1], [3, 1, 0, 0], [5, 1, 0, 0]]
    assert batch["labels"].tolist() == [[i, i, 5, 1], [i, 1, i, i], [5, 1, i, i]]


def test_characters_without_a_token_mark_nothing():
    """A pre-tokenizer that drops spaces: the next token does not begin where the completion's last
    space stood.
    """
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    turns = [
        {"role": r, "content": c}
        for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d <eos>"))
    ]
    out = tokenize_causal({"messages": [turns]}, tokenizer, 8)
    assert out["input_ids"] == [[3, 4, 5, 6, 1]]
    assert out["labels"] == [[IGNORED, 4, IGNORED, 6, 1]]


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (tokenize_causal, {"prompt": ["a"], "completion": ["b"]}),
        (tokenize_words, {"tokens": [["a"]]}),
        (tokenize_questions, {"question": ["a"], "context": ["b"]}),
    ],
)
def test_a_tokenizer_without_offsets_is_refused(function, rows):
    with pytest.raises(ConfigError, match=r"ByT5Tokenizer has no token offsets.*fast tokenizer"):
        function(rows, ByT5Tokenizer(), 8)


def test_masked_rows_by_hand():
    out = tokenize_masked(
        {"text": ["a b c d", "a", "", None, "<unk> a", "zzz"]}, encoder_tokenizer(), 5
    )
    assert out["input_ids"] == [[13, 3, 4, 5, 14], [13, 3, 14], [], [], [13, 2, 3, 14], [13, 2, 14]]
    assert out["num_targets"] == [3, 1, 0, 0, 1, 0]
    assert out["was_truncated"] == [True] + [False] * 5
    assert "token_type_ids" not in out
    assert "label" not in out


def test_pairs_by_hand():
    """The longer text is cut first. A row with one of two texts is used, one with none is not."""
    rows = {"text": ["a", "a b c d e", "", None], "text_pair": ["b c", "f", "g", ""]}
    out = tokenize_texts(rows, encoder_tokenizer(), 7)
    assert out["input_ids"] == [
        [13, 3, 14, 4, 5, 14],
        [13, 3, 4, 5, 14, 8, 14],
        [13, 14, 9, 14],
        [],
    ]
    assert out["token_type_ids"] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1], []]
    assert out["was_truncated"] == [False, True, False, False]
    assert out["num_targets"] == [1, 1, 1, 0]
    assert "label" not in out
    samples = [{k: v[i] for k, v in out.items()} for i in range(3)]
    batch = collation.collate_samples(samples, 0)
    assert batch["token_type_ids"].tolist() == [
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 0, 0, 0],
    ]
    assert "labels" not in batch


def test_the_cached_special_tokens_do_not_depend_on_the_limit():
    tokenizer = encoder_tokenizer()
    for limit in (3, 4, 12):
        cut = tokenize_texts({"text": ["a b c d e f"]}, tokenizer, limit)["input_ids"][0]
        assert cut == [13, *ids_of("a b c d e f")[: limit - 2], 14]


@pytest.mark.parametrize(("function", "rows", "least"), [
    (tokenize_texts, {"text": ["a"]}, 2),
    (tokenize_texts, {"text": ["a"], "text_pair": ["b"]}, 3),
    (tokenize_masked, {"text": ["a"]}, 2),
    (tokenize_words, {"tokens": [["a"]]}, 2),
    (tokenize_choices, {"text": ["a"], "choices": [["b"]]}, 3),
])  # fmt: skip
def test_no_room_beside_special_tokens_is_refused(function, rows, least):
    with pytest.raises(
        ConfigError, match=f"max_length {least} leaves no room besides the {least} special tokens"
    ):
        function(rows, encoder_tokenizer(), least)
    assert function(rows, encoder_tokenizer(), least + 1)["length"] == [least + 1]


def test_words_by_hand():
    """<cls> 1, <sep> 2, `ab` 4, `a` 5, `##a` 15, `##b` 16, `##c` 17, ...; the first piece of a word
    carries its tag.
    """
    words = [["ab", "abc", "b"], ["abcd", "abcd"], [], None, ["\u200b", "b", "\x00"], ["\x00"]]
    tags = [[7, 8, 9], [1, 2], [], None, [4, 5, 6], [3]]
    out = tokenize_words({"tokens": words, "label": tags}, piece_tokenizer(), 7)
    i = IGNORED
    assert out["input_ids"] == [
        [1, 4, 4, 17, 6, 2],
        [1, 4, 17, 18, 4, 17, 2],
        [],
        [],
        [1, 6, 2],
        [1, 2],
    ]
    assert out["label"] == [[i, 7, 8, i, 9, i], [i, 1, i, i, 2, i, i], [], [], [i, 5, i], [i, i]]
    assert out["num_targets"] == [3, 2, 0, 0, 1, 0]
    assert out["length"] == [6, 7, 0, 0, 3, 2]
    assert out["was_truncated"] == [False, True, False, False, False, False]
    batch = collation.collate_samples(
        [{"input_ids": out["input_ids"][n], "label": out["label"][n]} for n in (0, 4)], 0
    )
    assert batch["labels"].tolist() == [[i, 7, 8, i, 9, i], [i, 5, i, i, i, i]]
    unlabelled = tokenize_words({"tokens": words}, piece_tokenizer(), 7)["label"]
    assert unlabelled[0] == [i, 0, 1, i, 2, i]


def seq2seq_tokenizer(**special) -> PreTrainedTokenizerFast:
    """Letters, completed as for a T5: <eos> 1 behind sources and targets."""
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>", **special)
    complete_tokenizer(tokenizer, "encoder-decoder")
    return tokenizer


def test_targets_by_hand():
    """Both are cut at 4 tokens, and keep their end. All tokens of a target count, its end too. An
    empty source is no sample.
    """
    rows = {"text": ["a b c d", "a", "b", "", "c"], "target": ["e", "e f g h", "", "f", None]}
    out = tokenize_targets(rows, seq2seq_tokenizer(), 4)
    assert out["input_ids"] == [[3, 4, 5, 1], [3, 1], [4, 1], [], [5, 1]]
    assert out["length"] == [
        4,
        2,
        2,
        0,
        2,
    ]
    assert out["labels"] == [[7, 1], [7, 8, 9, 1], [], [], []]
    assert out["num_targets"] == [
        2,
        4,
        0,
        0,
        0,
    ]
    assert out["was_truncated"] == [True, True, False, False, False]
    assert out["target"] == [
        "e",
        "e f g h",
        "",
        "f",
        "",
    ]
    uncut = tokenize_targets(rows, seq2seq_tokenizer(), None)
    assert uncut["labels"][1] == [7, 8, 9, 10, 1]
    assert not any(uncut["was_truncated"])
    assert set(tokenize_targets({"text": ["a"]}, seq2seq_tokenizer(), 4)) == {
        "input_ids",
        "length",
        "num_targets",
        "was_truncated",
    }
    # A tokenizer that adds no end, as BERT's and GPT-2's: it is added within the limit, if there is
    # one.
    rows = {"text": ["a"], "target": ["e f g h"]}
    assert tokenize_targets(rows, letter_tokenizer(), 3)["labels"] == [[7, 8, 1]]
    assert tokenize_targets(rows, letter_tokenizer(eos_token=None), 3)["labels"] == [[7, 8, 9]]


def test_targets_have_a_width_of_their_own():
    """And one place where none of a batch has a target: a decoder needs one."""
    samples = [
        {"input_ids": [3, 1], "labels": [7, 8, 1]},
        {"input_ids": [3, 4, 5, 1], "labels": []},
    ]
    batch = collation.collate_samples(samples, pad_token_id=0)
    assert batch["labels"].tolist() == [[7, 8, 1], [IGNORED] * 3]
    assert batch["input_ids"].tolist() == [[3, 1, 0, 0], [3, 4, 5, 1]]
    assert collation.collate_samples(samples[1:], pad_token_id=0)["labels"].tolist() == [[IGNORED]]
    assert "labels" not in collation.collate_samples([{"input_ids": [3, 1]}], pad_token_id=0)
