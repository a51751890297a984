"""Losses of the embeddings of a whole window: functions (outputs, batch) -> the window's mean loss.

They need all samples at once, so `hf_ga.prepare` takes them as `whole_batch`. All of them compare
embeddings by cosine similarity, and compute in at least float32. A large similarity matrix is
computed in blocks of rows and recomputed in the backward, so that memory grows with the number of
samples and not with its square.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_ga.embedding.model import LOG_TEMPERATURE
from hf_ga.errors import ConfigError
from hf_ga.model.precision import at_least_float32

# Prefix of a batch entry with the ids of a column's texts, int64: "text_id_anchor". Equal texts
# have equal ids.
TEXT_ID = "text_id_"
# The text id of a sample that has no negative.
NO_TEXT = 0
# The batch entry with the similarity scores of pairs.
SCORE = "score"
# Elements of one block of the similarity matrix: 16 MiB in float32.
NUM_ELEMENTS = 2**22

Outputs = Mapping[str, Tensor]
Batch = Mapping[str, Any]
WindowLoss = Callable[[Outputs, Batch], Tensor]


@dataclass(frozen=True)
class InfoNCE:
    """Multiple negatives ranking loss: each anchor must find its positive among the positives and
    negatives of all samples of the window.

    The loss of anchor a with positive p is -log(exp(cos(a, p) / t) / sum over all candidates c of
    exp(cos(a, c) / t)); that of the window is the mean over its anchors (van den Oord et al. 2018,
    Representation Learning with Contrastive Predictive Coding; Henderson et al. 2017, Efficient
    Natural Language Response Suggestion for Smart Reply).

    If the batch has text ids (`text_id_...`), false negatives are excluded from the sum: candidates
    with the same text as the anchor's positive, and the positives of other anchors with the same
    text as this anchor.

    Attributes:
        temperature: t, unless the model has a learned temperature.
        symmetric: Whether to take the mean of this loss and the one in which each positive must
            find its anchor among all anchors (Radford et al. 2021, Learning Transferable Visual
            Models From Natural Language Supervision).

    Example:
        model, optimizer = hf_ga.prepare(
            accelerator, EmbeddingModel(encoder), optimizer, windows, whole_batch=InfoNCE(0.05)
        )
    """

    temperature: float = 0.05
    symmetric: bool = False

    def __call__(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Compute the contrastive loss of the window: the mean cross entropy of finding each
        anchor's positive among all positives and negatives by cosine similarity.

        Args:
            outputs: The embeddings of the columns `anchor`, `positive`, and optionally `negative`,
                ..., each of shape (samples, embedding dim); optionally `log_temperature`, a scalar.
            batch: Optionally the text ids `text_id_anchor`, `text_id_positive`, ...: int64, shape
                (samples,), equal for equal texts; 0 for a missing negative.

        Returns:
            A scalar.
        """
        scale = 1 / temperature_of(outputs, self.temperature)
        negatives = [name for name in outputs if name.startswith("negative")]
        loss = _retrieval_loss(outputs, batch, "anchor", ["positive", *negatives], scale)
        if not self.symmetric:
            return loss
        opposite_loss = _retrieval_loss(outputs, batch, "positive", ["anchor"], scale)
        return (loss + opposite_loss) / 2


def _retrieval_loss(
    outputs: Outputs,
    batch: Batch,
    query_column: str,
    candidate_columns: list[str],
    scale: Tensor | float,
) -> Tensor:
    """Compute the mean cross entropy of finding, for each text of the query column, the text of the
    same sample in the first candidate column, among all candidates; `scale` is 1 / temperature.

    If the similarity matrix is large, it is computed in blocks of rows, which the backward
    recomputes.
    """
    query_ids = batch.get(TEXT_ID + query_column)
    candidate_ids = None
    if query_ids is not None:
        candidate_ids = torch.cat([batch[TEXT_ID + column] for column in candidate_columns])

    def sum_of_cross_entropies(
        rows: Tensor, queries: Tensor, candidates: Tensor, scale: Tensor | float
    ) -> Tensor:
        """Sum the cross entropies of the queries with the indices `rows`, whose logits are the
        scaled cosine similarities with all candidates.
        """
        logits = scale * (queries[rows] @ candidates.T)
        if query_ids is not None:
            excluded = excluded_candidates(rows, query_ids, candidate_ids)
            logits = logits.masked_fill(excluded, -torch.inf)
        return F.cross_entropy(logits, rows, reduction="sum")

    queries = outputs[query_column]
    candidates = torch.cat([outputs[column] for column in candidate_columns])
    with torch.autocast(queries.device.type, enabled=False):
        arguments = (unit_vectors(queries), unit_vectors(candidates), scale)
        rows = torch.arange(len(queries), device=queries.device)
        rows_per_block = max(1, NUM_ELEMENTS // len(candidates))
        blocks = rows.split(rows_per_block)
        if len(blocks) == 1:
            return sum_of_cross_entropies(rows, *arguments) / len(queries)
        sums = [
            checkpoint(
                sum_of_cross_entropies,
                block,
                *arguments,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for block in blocks
        ]
        return torch.stack(sums).sum() / len(queries)


def excluded_candidates(rows: Tensor, query_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """Find the candidates that must not count as negatives of a query in a contrastive loss of
    embeddings: those with the same text as its match, the matches of queries with the same text,
    and missing texts.

    Args:
        rows: The indices of the queries, shape (num_rows,).
        query_ids: The id of the text of each query, shape (num_queries,), equal for equal texts.
        candidate_ids: The id of each candidate, shape (num_candidates,). The first `num_queries`
            are the texts that belong to the queries, their matches.

    Returns:
        A bool mask, shape (num_rows, num_candidates); False for each query's own match.
    """
    excluded = candidate_ids[rows, None] == candidate_ids
    excluded |= candidate_ids == NO_TEXT
    excluded[:, : len(query_ids)] |= query_ids[rows, None] == query_ids
    excluded[torch.arange(len(rows), device=rows.device), rows] = False
    return excluded


@dataclass(frozen=True)
class CoSENT:
    """A loss for pairs of texts with similarity scores: a pair with a higher score must have a
    higher cosine similarity. Only the order of the scores matters.

    loss = log(1 + sum over all pairs of samples i, j with score_i < score_j of
    exp((cos_i - cos_j) / t))

    (Huang et al. 2024, CoSENT: Consistent Sentence Embedding via Similarity Ranking.)

    Attributes:
        temperature: t, unless the model has a learned temperature.
    """

    temperature: float = 0.05

    def __call__(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Compute the CoSENT loss of the window's text embeddings, which ranks the cosine
        similarities of pairs by their scores.

        With pairs i and j, it is log(1 + sum over all score_i < score_j of exp((cos_i - cos_j) /
        temperature)).

        Args:
            outputs: `anchor` and `positive`, the embeddings of the two texts of each pair, shape
                (samples, embedding dim); optionally `log_temperature`, a scalar.
            batch: `score`, shape (samples,).

        Returns:
            A scalar; 0 if all scores of the window are equal.
        """
        scores, order = batch[SCORE].sort()
        with torch.autocast(scores.device.type, enabled=False):
            anchors = unit_vectors(outputs["anchor"])
            positives = unit_vectors(outputs["positive"])
            cosines = (anchors * positives).sum(-1)
            logits = cosines[order] / temperature_of(outputs, self.temperature)
            # For each i, the log of the sum over all j from i on of exp(-cos_j / t).
            descending = -logits.flip(0)
            tails = torch.logcumsumexp(descending, 0).flip(0)
            tails = torch.cat([tails, tails.new_tensor([-torch.inf])])
            # For each i, the first j with a higher score: the sum over j begins there.
            first_higher = torch.searchsorted(scores, scores, right=True)
            terms = logits + tails[first_higher]
            # The 1 in the formula.
            log_of_one = terms.new_zeros(1)
            return torch.logsumexp(torch.cat([log_of_one, terms]), 0)


@dataclass(frozen=True)
class Matryoshka:
    """The sum of a loss over embeddings truncated to several sizes, so that their first dims alone
    can be used as a shorter embedding (Kusupati et al. 2022, Matryoshka Representation Learning).

    Attributes:
        loss: The loss of embeddings of one size.
        sizes: To how many dims the embeddings are truncated for each term of the sum.

    Example:
        Matryoshka(InfoNCE(), sizes=(384, 128, 64))
    """

    loss: WindowLoss
    sizes: tuple[int, ...]

    def __call__(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Compute the Matryoshka loss: the sum of the loss over embeddings truncated to each of the
        sizes.

        Args:
            outputs: The embeddings that `loss` needs.
            batch: The batch entries that `loss` needs.

        Returns:
            A scalar.

        Raises:
            ConfigError: If a size is larger than the embeddings.
        """
        total = outputs["anchor"].new_zeros(())
        for size in self.sizes:
            total = total + self.loss(truncate_embeddings(outputs, size), batch)
        return total


def truncate_embeddings(outputs: Outputs, size: int) -> dict[str, Tensor]:
    """Truncate each embedding to its first `size` dims, for one term of a Matryoshka loss.

    Args:
        outputs: Embeddings, shape (samples, embedding dim), and scalars, which are not changed.
        size: At most the embedding dim.

    Returns:
        A new dict with embeddings of shape (samples, size).

    Raises:
        ConfigError: If the embeddings are shorter.
    """
    embedding_dim = outputs["anchor"].shape[-1]
    if size > embedding_dim:
        raise ConfigError(
            f"a Matryoshka size must be at most the vectors' {embedding_dim}, got {size}."
        )
    truncated = dict(outputs)
    for name, value in outputs.items():
        if value.dim():
            truncated[name] = value[..., :size]
    return truncated


def unit_vectors(vectors: Tensor) -> Tensor:
    """Normalize embeddings to length 1 over their last dim, in at least float32, so that their dot
    products are cosine similarities.
    """
    return F.normalize(at_least_float32(vectors), dim=-1)


def temperature_of(outputs: Outputs, fixed: float) -> Tensor | float:
    """Return the temperature of a contrastive loss of embeddings: the learned one if the model's
    outputs have it (`log_temperature`), otherwise the fixed one.
    """
    learned = outputs.get(LOG_TEMPERATURE)
    if learned is None:
        return fixed
    return at_least_float32(learned).exp()
