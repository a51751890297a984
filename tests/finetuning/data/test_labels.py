"""Labels of all forms -> ids, names and weights, against mappings that are written by hand."""

import math
from decimal import Decimal

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hf_ga import DataError
from hf_ga.finetuning.data.encoding.labels import (
    encode_labels,
    encode_numbers,
    notes_on_similar_names,
)


def split(labels, **columns):
    return Dataset.from_dict({"text": ["a"] * len(labels), **columns, "label": labels})


def typed(labels, feature):
    features = Features({"text": Value("string"), "label": feature})
    return Dataset.from_dict({"text": ["a"] * len(labels), "label": labels}, features=features)


def encoded(kind, train, *others, known=None, notes=None):
    splits = dict(zip(("train", "validation", "test"), (train, *others), strict=False))
    rows = DatasetDict(
        {name: data if isinstance(data, Dataset) else split(data) for name, data in splits.items()}
    )
    if kind == "number":
        names = []
        result = {
            split: encode_numbers(dataset, split, "label", kind, [])
            for split, dataset in rows.items()
        }
    else:
        result, names = encode_labels(rows, kind, known, [] if notes is None else notes)
    assert all(len(result[name]) == len(rows[name]) for name in rows)
    return names, *(result[name]["label"][:] for name in result)


def test_classes_in_sorted_order():
    for labels, names in [
        (["b", "a", "b", "ß", "日"], ["a", "b", "ß", "日"]),
        (
            [10, 9, 10, -1],
            ["-1", "9", "10"],
        ),  # whole numbers of a dataset that does not name them are as they are
        ([True, False], ["False", "True"]),
        (["10", "9"], ["10", "9"]),  # strings sort as strings
    ]:
        found, train, validation = encoded("class", labels, labels[:1])
        assert found == names
        assert [names[i] for i in train] == [str(label) for label in labels]
        assert validation == train[:1]


def test_whole_numbers_of_another_type():
    """1.0 and Decimal("1.00") are the class 1, also where another file has 1 or "1"."""
    for train, other in [
        ([1.0, 0.0, 10.0], [0, 10]),
        ([Decimal("1.00"), Decimal("0"), Decimal("10")], ["0", "10"]),
        ([1, 0, 10], [0.0, 10.0]),
        (["1", "0", "10"], [0.0, 10.0]),
    ]:
        names, ids, validation = encoded("class", train, other)
        assert names == ["0", "1", "10"]
        assert ids == [1, 0, 2]
        assert validation == [0, 2]
    assert encoded("classes", split([[1.0, 2.0], [1.0]])) == (["1", "2"], [[0, 1], [0]])


ONE_HOT = {  # rows of the training split and what they mean; None: lists of the classes that apply
    "two classes": ([[0, 1], [1, 0], [0, 1]], [[1], [0], [1]]),
    "both and none": ([[1, 1], [0, 0], [0, 1]], [[0, 1], [], [1]]),
    "three classes": ([[0, 1, 1], [1, 0, 0]], [[1, 2], [0]]),
    "a class that never applies": ([[0, 1, 0], [1, 0, 0]], [[1], [0]]),
    "truth values": ([[True, False], [False, True]], [[0], [1]]),
    "floats": ([[0.0, 1.0], [1.0, 1.0]], [[1], [0, 1]]),
    "always the same": ([[0, 1], [0, 1]], [[1], [1]]),
    "one class a row": ([[0], [1]], None),
    "other lengths": ([[0, 1], [0]], None),
    "other numbers": ([[0, 1], [1, 2]], None),
    "a row without classes": ([[0, 1], [], [1]], None),
    "names": ([["0", "1"], ["1", "0"]], None),
}


@pytest.mark.parametrize("name", ONE_HOT)
def test_a_zero_or_one_for_each_class(name):
    labels, expected = ONE_HOT[name]
    notes = []
    names, found = encoded("classes", split(labels), notes=notes)
    assert len(notes) == (expected is not None)
    if expected is None:
        found_names = [[names[i] for i in row] for row in found]
        assert found_names == [[str(label) for label in row] for row in labels]
        return
    assert names == [str(i) for i in range(len(labels[0]))]
    assert found == expected


def test_labels_that_repeat_are_no_ids():
    with pytest.raises(DataError, match="each label that applies once, or every list a 0 or 1"):
        encoded("classes", split([[0, 1, 1], [2, 0]]))


def test_other_splits_have_the_form_of_the_first():
    train = split([[0, 1], [1, 0]])
    assert encoded("classes", train, split([[1, 1]]))[2] == [[0, 1]]
    for wrong in ([[0, 1, 1]], [[1]], [[]], [None], [[0, 2]]):
        with pytest.raises(
            DataError, match="a 0 or 1 for each of 2 classes, but 1 of 1 validation rows"
        ):
            encoded("classes", train, split(wrong))
    assert encoded("classes", split([[0], [1, 2]]), split([[0, 1]]))[2] == [[0, 1]]
    named = typed([[1, 0], [0, 1]], List(ClassLabel(names=["z", "a"])))
    assert encoded("classes", named) == (["z", "a"], [[1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["neg", "pos", "pos "], ["'pos' and 'pos ' differ in spaces or case only"]),
        (["a b", "a  b", "ab", "c"], ["'a b' and 'a  b' and 'ab' differ in spaces or case only"]),
        (["POS", "neg", "pos"], ["'POS' and 'pos' differ in spaces or case only"]),
        (["A ", "a", "B", "b"], ["'A ' and 'a' differ in", "'B' and 'b' differ in spaces or case"]),
        (["\u00a0x", "x"], ["differ in spaces or case only"]),
        (["pos", "neg", "p-os", "posi"], []),
    ],
)
def test_names_that_look_alike(names, lines):
    found = notes_on_similar_names(names)
    assert len(found) == len(lines)
    assert all(line in fact for line, fact in zip(lines, found, strict=True))


def test_class_labels_are_numbered_as_the_dataset_does():
    """Another split may number the same names differently, or have the names themselves."""
    train = typed([2, 0, 2], ClassLabel(names=["z", "unused", "a"]))
    validation = typed([0, 1], ClassLabel(names=["a", "z"]))
    names, *ids = encoded("class", train, validation, ["unused", "z"])
    assert names == ["z", "unused", "a"]
    assert ids == [[2, 0, 2], [2, 0], [1, 0]]
    _, _, by_number = encoded("class", train, [0, 1, 2])
    assert by_number == [0, 1, 2]
    # A whole number is a number of the dataset, although it looks like a name; a string is a name.
    train = typed([0, 1], ClassLabel(names=["1", "2"]))
    assert encoded("class", train, [0, 1], ["1", "2"]) == (["1", "2"], [0, 1], [0, 1], [0, 1])


def test_numbers_that_another_file_wrote_as_names():
    """A CSV file holds 0 where a JSON file holds "0"."""
    assert encoded("class", ["0", "1", "10"], [10, 0]) == (["0", "1", "10"], [0, 1, 2], [2, 0])
    assert encoded("class", [0, 1, 10], ["10", "0"]) == (["0", "1", "10"], [0, 1, 2], [2, 0])
    with pytest.raises(
        DataError,
        match=r"among the 2 of the training rows \(0, 1\), but .* validation rows have \['2'\]",
    ):
        encoded("class", ["0", "1"], [2])


def test_labels_that_training_does_not_know():
    for unknown in (["c"], ["c", "a", "c"], ["A"]):
        for split, others in {"validation": [unknown], "test": [["a"], unknown]}.items():
            with pytest.raises(
                DataError,
                match=rf"labels must be among the 2 .* {split} rows have \['{unknown[0]}'\]",
            ):
                encoded("class", ["a", "b"], *others)
    with pytest.raises(
        DataError, match=r"labels must be among .* train rows have \['-1'\]"
    ):  # how hub datasets mark secret labels
        encoded("class", typed([0, -1, 1], ClassLabel(names=["a", "b"])))


def test_one_class_alone():
    for kind, labels in (
        ("class", ["same"] * 3),
        ("classes", [["same"], []]),
        ("classes", [[], []]),
    ):
        with pytest.raises(
            DataError, match=r"all training rows have the label '(same|none)'.*two labels"
        ):
            encoded(kind, split(labels))


def test_known_names_keep_their_order():
    """The control: without a head the order is that of the names."""
    labels = ["neg", "pos", "neutral", "neg"]
    assert encoded("class", labels) == (["neg", "neutral", "pos"], [0, 2, 1, 0])
    assert encoded("class", ["neg", "pos"], known=["pos", "neutral"]) == (
        ["neg", "pos"],
        [0, 1],
    )  # of another task
    head = ["pos", "neutral", "neg", "mixed"]
    assert encoded("class", labels, known=head) == (head, [2, 0, 1, 2])
    assert encoded("class", ["neg"], ["mixed", "pos"], known=head) == (
        head,
        [2],
        [3, 0],
    )  # an evaluation may hold few
    assert encoded("classes", split([["neg", "pos"], []]), known=head) == (head, [[2, 0], []])
    tagged = split([["neg", "pos"]], tokens=[["a", "b"]])
    assert encoded("tags", tagged, known=head) == (head, [[2, 0]])
    # The dataset's numbers stand for its names, which are the head's in another order.
    train = typed([0, 1, 2], ClassLabel(names=["neg", "neutral", "pos"]))
    head = ["pos", "neg", "neutral"]
    assert encoded("class", train, [0, 1, 2], ["neg", "neutral", "pos"], known=head) == (
        head,
        [1, 2, 0],
        [1, 2, 0],
        [1, 2, 0],
    )


def test_sets_of_classes():
    """None and an empty list are the empty set."""
    names, train, validation = encoded(
        "classes", split([["b", "a"], [], None, ["c"]]), split([["c", "b"], []])
    )
    assert (names, train, validation) == (["a", "b", "c"], [[1, 0], [], [], [2]], [[2, 1], []])
    assert encoded("classes", split([[3, 20], [1]])) == (["1", "3", "20"], [[1, 2], [0]])
    assert encoded("classes", split([[3, 1]]), split([[], []]))[2] == [[], []]
    with pytest.raises(DataError, match=r"labels must be among .* validation rows have .*'c'"):
        encoded("classes", split([["a"], ["b"]]), split([["a", "c"]]))


def test_lists_of_class_labels():
    train = typed([[1, 0], [], [1]], List(ClassLabel(names=["z", "a", "unused"])))
    assert encoded("classes", train, split([["unused", "z"]])) == (
        ["z", "a", "unused"],
        [[1, 0], [], [1]],
        [[2, 0]],
    )
    fixed = typed([[1, 0], [0, 0]], List(ClassLabel(names=["z", "a"]), length=2))
    assert encoded("classes", fixed) == (["z", "a"], [[1, 0], [0, 0]])
    with pytest.raises(DataError, match=r"labels must be among .* train rows have \['-1'\]"):
        encoded("classes", typed([[-1], [0]], List(ClassLabel(names=["z", "a"]))))


def test_tags():
    rows = split([["N", "V"], [], ["N"]], tokens=[["dogs", "bark"], [], ["dog"]])
    validation = split([["V"]], tokens=[["go"]])
    assert encoded("tags", rows, validation) == (["N", "V"], [[0, 1], [], [0]], [[1]])
    features = Features(
        {"tokens": List(Value("string")), "label": List(ClassLabel(names=["O", "B-X"]))}
    )
    named = Dataset.from_dict({"tokens": [["a", "b"]], "label": [[1, 0]]}, features=features)
    assert encoded("tags", named, split([["O", "B-X"]], tokens=[["a", "b"]])) == (
        ["O", "B-X"],
        [[1, 0]],
        [[0, 1]],
    )


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ([["N"], ["N", "V"]], [["a"], ["a"]]),
        ([["N", "V"], []], [["a", "b"], ["a"]]),
        ([["N", "V"], ["N"]], [["a", "b"], None]),
        ([["N", "V"], None], [["a", "b"], ["c"]]),
    ],
)
def test_every_word_needs_one_tag(tags, words):
    with pytest.raises(DataError, match="every word needs one tag, but 1 of 2 train rows have"):
        encoded("tags", split(tags, tokens=words))


def test_numbers():
    """Whole numbers and those with a fraction; -1 is a number, and so are those of ClassLabels.
    There are no names.
    """
    assert encoded("number", [1, -1, 3], [0.25]) == ([], [1.0, -1.0, 3.0], [0.25])
    assert encoded("number", typed([1, 0], ClassLabel(names=["a", "b"]))) == ([], [1.0, 0.0])
    _, numbers = encoded("number", [1, 2])
    assert all(isinstance(number, float) for number in numbers)


WRONG = {  # kind: good labels, rule, labels that break it
    "class": (
        ["a", "b"],
        "labels must be names or whole numbers",
        [
            [0, None, 1],
            ["a", None, "b"],
            [0.0, 1.5],
            [0.0, math.nan],
            [0.0, math.inf],
            [[0], [1]],
            [{"a": 1}, {"a": 2}],
            [None, None],
        ],
    ),
    "classes": (
        [["a"], ["b"]],
        "labels must be lists of names or whole numbers",
        [["a", "b"], [0, 1], [[0.5], [1.0]], [["a", None]], [[["a"]]]],
    ),
    "tags": (
        [["N", "V"], ["N", "N"]],
        "labels must be lists of names or whole numbers",
        [[["N", None]], ["NV"]],
    ),
    "number": (
        [1.0, 2.0],
        "labels of a regression must be finite float32 numbers",
        [
            [1.0, None],
            [1.0, math.nan],
            [math.inf, 1.0],
            ["1.5", "2 m"],
            [[1.0]],
            [None],
        ],
    ),
}


@pytest.mark.parametrize(
    ("kind", "labels"), [(kind, labels) for kind in WRONG for labels in WRONG[kind][-1]], ids=str
)
def test_what_is_no_label(kind, labels):
    good, rule, _ = WRONG[kind]
    good, wrong = (split(values, tokens=[["a", "b"]] * len(values)) for values in (good, labels))
    for name, splits in {"train": [wrong], "validation": [good, wrong]}.items():
        with pytest.raises(DataError, match=f"{rule}.*{name} rows.*--label_column"):
            encoded(kind, *splits)


@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_a_blank_label_is_no_class(blank):
    with pytest.raises(DataError, match=r"1 of 3 train rows have .*first: row 2, counted from 0"):
        encoded("class", split(["no", "yes", blank]))
