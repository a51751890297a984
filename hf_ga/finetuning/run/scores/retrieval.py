"""Metrics of text embeddings: retrieval metrics, computed by pytrec_eval (TREC's measures), and
Spearman's rank correlation.
"""

from collections import defaultdict

import numpy as np
import pytrec_eval
import scipy.stats
import torch
from torch import Tensor

from hf_ga.finetuning.data.encoding.pairs import NO_TEXT
from hf_ga.finetuning.run.scores.metrics import pearson

NUM_RETRIEVED = 10
# Number of queries whose similarities to all documents are computed at once.
QUERIES_PER_BLOCK = 1024
# Our name of a metric -> TREC's. The reciprocal rank is that among the 10 retrieved documents.
MEASURES = {
    "recall_at_1": "recall_1",
    "recall_at_10": "recall_10",
    "mrr_at_10": "recip_rank",
    "ndcg_at_10": "ndcg_cut_10",
}


def retrieval_metrics(
    queries: Tensor, documents: Tensor, query_ids: Tensor, document_ids: Tensor
) -> dict[str, float]:
    """Compute the retrieval metrics of an evaluation of `--task embedding`: recall at 1 and 10,
    mean reciprocal rank and nDCG at 10.

    Each anchor is a query, and its positive is a relevant document. The search ranks all positives
    and negatives of the split by cosine similarity. Equal texts are one query or one document, so a
    query has as many relevant documents as its text has different positives.

    Args:
        queries: Unit vectors of the anchors, shape (num_queries, dim).
        documents: Unit vectors of the positives, in the order of their anchors, then of the
            negatives, shape (num_documents, dim).
        query_ids: Ids of the queries' texts, equal for equal texts: int64, shape (num_queries,).
        document_ids: Ids of the documents' texts, shape (num_documents,); 0 for a missing negative.

    Returns:
        Name of a metric in `MEASURES` -> mean over the queries.
    """
    relevant: dict[str, dict[str, int]] = defaultdict(dict)
    positive_ids = document_ids[: len(query_ids)]
    for query_id, positive_id in zip(query_ids.tolist(), positive_ids.tolist(), strict=True):
        relevant[str(query_id)][str(positive_id)] = 1
    queries, query_ids = _distinct(queries, query_ids)
    documents, document_ids = _distinct(documents, document_ids)
    retrieved = _retrieve(queries, documents, query_ids, document_ids)
    evaluator = pytrec_eval.RelevanceEvaluator(relevant, {"recall.1,10", "recip_rank", "ndcg_cut"})
    metrics_of_queries = evaluator.evaluate(retrieved).values()
    return {
        name: float(np.mean([metrics[measure] for metrics in metrics_of_queries]))
        for name, measure in MEASURES.items()
    }


def _retrieve(
    queries: Tensor, documents: Tensor, query_ids: Tensor, document_ids: Tensor
) -> dict[str, dict[str, float]]:
    """Retrieve for each query the 10 documents with the largest cosine similarity, for the metrics
    of `--task embedding`.
    """
    retrieved: dict[str, dict[str, float]] = {}
    num_retrieved = min(NUM_RETRIEVED, len(documents))
    # By blocks, because the similarities of all queries may not fit into memory.
    found = [
        (block @ documents.T).topk(num_retrieved) for block in queries.split(QUERIES_PER_BLOCK)
    ]
    scores = torch.cat([values for values, _ in found]).tolist()
    ids = document_ids[torch.cat([indices for _, indices in found]).cpu()].tolist()
    for i, query_id in enumerate(query_ids.tolist()):
        retrieved[str(query_id)] = dict(zip(map(str, ids[i]), scores[i], strict=True))
    return retrieved


def _distinct(vectors: Tensor, text_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the vectors of repeated texts, except the first of each, and those of missing texts, for
    the metrics of `--task embedding`.
    """
    _, first_indices = np.unique(text_ids.numpy(), return_index=True)
    indices = torch.from_numpy(np.sort(first_indices))
    indices = indices[text_ids[indices] != NO_TEXT]
    return vectors[indices.to(vectors.device)], text_ids[indices]


def spearman(first: Tensor, second: Tensor, scores: Tensor) -> float:
    """Compute the metric of `--task embedding` for pairs with a score: Spearman's rank correlation
    between the cosine similarities of the pairs and their true scores.

    Args:
        first: Unit vectors of the first texts, shape (pairs, dim).
        second: Unit vectors of the second texts, shape (pairs, dim).
        scores: The true scores, shape (pairs,).

    Returns:
        The correlation; 0 if the similarities or the scores are constant.
    """
    similarities = (first * second).sum(-1).double().cpu().numpy()
    return pearson(scipy.stats.rankdata(similarities), scipy.stats.rankdata(scores.numpy()))
