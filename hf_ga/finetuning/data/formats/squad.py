"""SQuAD's own nested JSON (articles with paragraphs with questions) -> one row per question."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from hf_ga.finetuning.data.formats.documents import to_dataset

PARAGRAPHS = "paragraphs"  # the column that has the paragraphs of an article


def flatten_articles(dataset: Dataset) -> Dataset:
    """Replace each article of SQuAD's nested format by a row per question; rows of another format
    are returned unchanged.

    An article is {"title": ..., "paragraphs": [{"context": ..., "qas": [question, ...]}, ...]}, and
    a question {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}, ...]}.
    The `plausible_answers` of SQuAD 2 are not used. If no question has `answers`, the rows have no
    such column.
    """
    paragraph = getattr(dataset.features.get(PARAGRAPHS), "feature", None)
    if isinstance(paragraph, dict) and {"context", "qas"} <= paragraph.keys():
        return to_dataset([row for article in dataset for row in _questions_in(article)])
    return dataset


def _questions_in(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each question of a SQuAD article."""
    for paragraph in article[PARAGRAPHS] or ():
        for question in paragraph["qas"] or ():
            row = {
                "id": question.get("id"),
                "title": article.get("title"),
                "question": question.get("question"),
                "context": paragraph["context"],
            }
            answers = question.get("answers")
            if answers is not None or question.get("is_impossible"):
                row["answers"] = answers or []
            yield row
