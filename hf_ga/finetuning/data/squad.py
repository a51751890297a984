"""SQuAD's own nested form of files -> one row per question."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset, DatasetDict, Features, List, Value

ARTICLES = "paragraphs"  # the column of articles that holds their paragraphs
ANSWERS = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
FEATURES = Features(
    {
        "id": Value("string"),
        "title": Value("string"),
        "question": Value("string"),
        "context": Value("string"),
        "answers": ANSWERS,
    }
)


def questions_of(rows: DatasetDict) -> DatasetDict:
    """Replace articles by their questions; leave rows of another form unchanged.

    An article is {"title": ..., "paragraphs": [{"context": ..., "qas": [question, ...]}, ...]}, and
    a question {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}, ...]}.
    The `plausible_answers` of SQuAD 2 are not used. If no question of a split has `answers`, its
    rows have no such column.
    """
    splits = {}
    for split, dataset in rows.items():
        splits[split] = _questions_of(dataset) if _has_articles(dataset) else dataset
    return DatasetDict(splits)


def _has_articles(dataset: Dataset) -> bool:
    paragraph = getattr(dataset.features.get(ARTICLES), "feature", None)
    return isinstance(paragraph, dict) and {"context", "qas"} <= paragraph.keys()


def _questions_of(articles: Dataset) -> Dataset:
    questions = [row for article in articles for row in _rows_of(article)]
    columns = {name: [row[name] for row in questions] for name in FEATURES}
    dataset = Dataset.from_dict(columns, FEATURES)
    has_answers = any(answers is not None for answers in columns["answers"])
    return dataset if has_answers else dataset.remove_columns("answers")


def _rows_of(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for paragraph in article[ARTICLES] or ():
        for question in paragraph["qas"] or ():
            yield {
                "id": str(question.get("id")),
                "title": article.get("title"),
                "question": question.get("question"),
                "context": paragraph["context"],
                "answers": _answers_of(question),
            }


def _answers_of(question: dict[str, Any]) -> dict[str, list] | None:
    """The answers of a question as one row has them; None if they are not given."""
    answers = question.get("answers")
    if answers is None:
        return {"text": [], "answer_start": []} if question.get("is_impossible") else None
    return {name: [answer.get(name) for answer in answers] for name in ANSWERS}
