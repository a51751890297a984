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
    splits = DatasetDict()
    for split, dataset in rows.items():
        splits[split] = dataset
        paragraph = getattr(dataset.features.get(PARAGRAPHS), "feature", None)
        if isinstance(paragraph, dict) and {"context", "qas"} <= paragraph.keys():
            questions = [row for article in dataset for row in _questions_in(article)]
            columns = {name: [row[name] for row in questions] for name in FEATURES}
            splits[split] = Dataset.from_dict(columns, FEATURES)
            if all(answers is None for answers in columns["answers"]):
                splits[split] = splits[split].remove_columns("answers")
    return splits


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
