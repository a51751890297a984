"""SQuAD's own nested JSON (articles with paragraphs with questions) -> one row per question."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset, DatasetDict, Features, List, Value

PARAGRAPHS = "paragraphs"  # the column that has the paragraphs of an article
FEATURES = Features(
    {
        "id": Value("string"),
        "title": Value("string"),
        "question": Value("string"),
        "context": Value("string"),
        "answers": {"text": List(Value("string")), "answer_start": List(Value("int64"))},
    }
)


def flatten_articles(rows: DatasetDict) -> DatasetDict:
    """Replace each article of SQuAD's nested format by a row per question; splits of another format
    are returned unchanged.

    An article is {"title": ..., "paragraphs": [{"context": ..., "qas": [question, ...]}, ...]}, and
    a question {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}, ...]}.
    The `plausible_answers` of SQuAD 2 are not used. If no question of a split has `answers`, its
    rows have no such column.
    """
    splits = {}
    for split, dataset in rows.items():
        splits[split] = _question_rows(dataset) if _has_articles(dataset) else dataset
    return DatasetDict(splits)


def _has_articles(dataset: Dataset) -> bool:
    """Return whether the rows of a dataset are articles in SQuAD's nested format."""
    paragraph = getattr(dataset.features.get(PARAGRAPHS), "feature", None)
    return isinstance(paragraph, dict) and {"context", "qas"} <= paragraph.keys()


def _question_rows(articles: Dataset) -> Dataset:
    """Convert articles of SQuAD's nested format to a dataset with one row per question."""
    questions = [row for article in articles for row in _questions_in(article)]
    columns = {name: [row[name] for row in questions] for name in FEATURES}
    dataset = Dataset.from_dict(columns, FEATURES)
    has_answers = any(answers is not None for answers in columns["answers"])
    return dataset if has_answers else dataset.remove_columns("answers")


def _questions_in(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each question of a SQuAD article, with the columns of `FEATURES`."""
    for paragraph in article[PARAGRAPHS] or ():
        for question in paragraph["qas"] or ():
            answers = question.get("answers")
            if answers is None and question.get("is_impossible"):
                answers = []
            if answers is not None:
                answers = {
                    name: [answer.get(name) for answer in answers]
                    for name in ("text", "answer_start")
                }
            yield {
                "id": str(question.get("id")),
                "title": article.get("title"),
                "question": question.get("question"),
                "context": paragraph["context"],
                "answers": answers,
            }
