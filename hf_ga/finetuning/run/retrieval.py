"""Metrics of vectors: retrieval by pytrec_eval (TREC's measures), rank correlation by scipy."""

from collections import defaultdict

import numpy as np
import pytrec_eval
import scipy.stats
import torch
from torch import Tensor

from hf_ga.finetuning.data.pairs import NO_TEXT

NUM_RETRIEVED = 10
NUM_QUERIES = 1024  # whose similarities to all documents are computed at once
MEASURES = {  # our name: TREC's
    "recall_at_1": "recall_1",
    "recall_at_10": "recall_10",
    "mrr_at_10": "recip_rank",  # of the 10 documents that are retrieved
    "ndcg_at_10": "ndcg_cut_10",
}


def retrieval_metrics(
    queries: Tensor, documents: Tensor, query_ids: Tensor, document_ids: Tensor
) -> dict[str, float]:
    """Recall at 1 and 10, mean reciprocal rank and nDCG at 10 of a search for the positives of each
    anchor among all positives and negatives of a split, by the cosine.

    Equal texts are one query or one document, so a query has as many relevant documents as its text
    has different positives.

    Args:
        queries: Vectors of the anchors, of length 1, shape (n, size).
        documents: Vectors of the positives, then of the negatives, shape (m, size).
        query_ids: int64, equal for equal texts, shape (n,).
        document_ids: The same of the documents, shape (m,); 0 for a missing negative.
    """
    relevant: dict[str, dict[str, int]] = defaultdict(dict)
    pairs = zip(query_ids.tolist(), document_ids[: len(query_ids)].tolist(), strict=True)
    for query, document in pairs:
        relevant[str(query)][str(document)] = 1
    queries, query_ids = _distinct(queries, query_ids)
    documents, document_ids = _distinct(documents, document_ids)
    found: dict[str, dict[str, float]] = {}
    for block, ids in zip(queries.split(NUM_QUERIES), query_ids.split(NUM_QUERIES), strict=True):
        scores, places = (block @ documents.T).topk(min(NUM_RETRIEVED, len(documents)))
        retrieved = document_ids[places.cpu()]
        for query, names, values in zip(
            ids.tolist(), retrieved.tolist(), scores.tolist(), strict=True
        ):
            found[str(query)] = dict(zip(map(str, names), values, strict=True))
    evaluator = pytrec_eval.RelevanceEvaluator(relevant, {"recall.1,10", "recip_rank", "ndcg_cut"})
    measured = evaluator.evaluate(found).values()
    return {
        name: float(np.mean([of_query[measure] for of_query in measured]))
        for name, measure in MEASURES.items()
    }


def _distinct(vectors: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first of each text, in their order; without missing texts."""
    _, first = np.unique(ids.numpy(), return_index=True)
    places = torch.from_numpy(np.sort(first))
    places = places[ids[places] != NO_TEXT]
    return vectors[places.to(vectors.device)], ids[places]


def spearman(first: Tensor, second: Tensor, scores: Tensor) -> float:
    """Spearman's rank correlation of the cosines of pairs with their scores; 0 if either is
    constant.

    Args:
        first: Vectors of length 1, shape (n, size).
        second: The same.
        scores: Shape (n,).
    """
    cosines = (first * second).sum(-1).double().cpu().numpy()
    if not np.ptp(cosines) or not np.ptp(scores.numpy()):
        return 0.0
    return float(scipy.stats.spearmanr(cosines, scores.numpy()).statistic)
