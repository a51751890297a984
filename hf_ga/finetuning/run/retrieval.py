"""Metrics of vectors: retrieval by pytrec_eval (TREC's measures), rank correlation by scipy."""

from collections import defaultdict

import numpy as np
import pytrec_eval
import scipy.stats
import torch
from torch import Tensor

from hf_ga.finetuning.data.pairs import NO_TEXT

NUM_RETRIEVED = 10
# Queries whose similarities to all documents are computed at once.
NUM_QUERIES = 1024
# Our name -> TREC's. The reciprocal rank is that among the 10 documents that are retrieved.
MEASURES = {
    "recall_at_1": "recall_1",
    "recall_at_10": "recall_10",
    "mrr_at_10": "recip_rank",
    "ndcg_at_10": "ndcg_cut_10",
}


def retrieval_metrics(
    queries: Tensor, documents: Tensor, query_ids: Tensor, document_ids: Tensor
) -> dict[str, float]:
    """Compute recall at 1 and 10, mean reciprocal rank and nDCG at 10 of a search for the positives
    of each anchor among all positives and negatives of a split, by the cosine.

    Equal texts are one query or one document, so a query has as many relevant documents as its text
    has different positives.

    Args:
        queries: Vectors of the anchors, of length 1, shape (n, size).
        documents: Vectors of the positives, then of the negatives, shape (m, size).
        query_ids: int64, equal for equal texts, shape (n,).
        document_ids: The same of the documents, shape (m,); 0 for a missing negative.

    Returns:
        Name of `MEASURES` -> mean over the queries.
    """
    relevant: dict[str, dict[str, int]] = defaultdict(dict)
    positive_ids = document_ids[: len(query_ids)]
    for query, document in zip(query_ids.tolist(), positive_ids.tolist(), strict=True):
        relevant[str(query)][str(document)] = 1
    queries, query_ids = _distinct(queries, query_ids)
    documents, document_ids = _distinct(documents, document_ids)
    found = _retrieved(queries, documents, query_ids, document_ids)
    evaluator = pytrec_eval.RelevanceEvaluator(relevant, {"recall.1,10", "recip_rank", "ndcg_cut"})
    measured = evaluator.evaluate(found).values()
    return {
        name: float(np.mean([of_query[measure] for of_query in measured]))
        for name, measure in MEASURES.items()
    }


def _retrieved(
    queries: Tensor, documents: Tensor, query_ids: Tensor, document_ids: Tensor
) -> dict[str, dict[str, float]]:
    """Retrieve the nearest documents of each query.

    Returns:
        Id of a query -> id of a document -> cosine, the form of pytrec_eval.
    """
    found: dict[str, dict[str, float]] = {}
    num_retrieved = min(NUM_RETRIEVED, len(documents))
    for block, ids in zip(queries.split(NUM_QUERIES), query_ids.split(NUM_QUERIES), strict=True):
        cosines = block @ documents.T
        scores, places = cosines.topk(num_retrieved)
        retrieved = document_ids[places.cpu()]
        of_queries = zip(ids.tolist(), retrieved.tolist(), scores.tolist(), strict=True)
        for query, names, values in of_queries:
            found[str(query)] = dict(zip(map(str, names), values, strict=True))
    return found


def _distinct(vectors: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the first vector of each text, in their order, and leave out missing texts."""
    _, first = np.unique(ids.numpy(), return_index=True)
    places = torch.from_numpy(np.sort(first))
    places = places[ids[places] != NO_TEXT]
    return vectors[places.to(vectors.device)], ids[places]


def spearman(first: Tensor, second: Tensor, scores: Tensor) -> float:
    """Compute Spearman's rank correlation of the cosines of pairs with their scores.

    Args:
        first: Vectors of length 1, shape (n, size).
        second: The vectors of the pairs' second texts, shape (n, size).
        scores: Shape (n,).

    Returns:
        The correlation; 0 if cosines or scores are constant.
    """
    cosines = (first * second).sum(-1).double().cpu().numpy()
    if not np.ptp(cosines) or not np.ptp(scores.numpy()):
        return 0.0
    correlation = scipy.stats.spearmanr(cosines, scores.numpy())
    return float(correlation.statistic)
