"""Losses of a whole window of vectors: functions of (outputs, batch) that return its mean loss.

They need all samples at once, so `hf_ga.prepare` takes them as `whole_batch`. All of them compare
vectors by their cosine, and compute in at least float32. A matrix of similarities that is large is
computed by blocks of rows, and again in the backward, so that memory grows with the number of
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
from hf_ga.exact.precision import at_least_float32

# + a column: the entry of a batch that tells equal texts, int64.
TEXT_ID = "text_id_"
# The id of a missing negative.
NO_TEXT = 0
SCORE = "score"
# Elements of one block of similarities: 16 MiB in float32.
NUM_ELEMENTS = 2**22

Outputs = Mapping[str, Tensor]
Batch = Mapping[str, Any]
WindowLoss = Callable[[Outputs, Batch], Tensor]


@dataclass(frozen=True)
class InfoNCE:
    """Multiple negatives ranking: each anchor must find its positive among the positives and
    negatives of all samples of the window.

    The loss of anchor a with positive p is -log(exp(cos(a, p) / t) / sum over all candidates c of
    exp(cos(a, c) / t)); that of the window is the mean over its anchors (van den Oord et al. 2018,
    Representation Learning with Contrastive Predictive Coding; Henderson et al. 2017, Efficient
    Natural Language Response Suggestion for Smart Reply).

    No candidate is a false negative because of equal texts: the sum leaves out those with the text
    of the anchor's positive, and the positives of anchors with the same text, where the batch has
    `text_id_...`.

    Attributes:
        temperature: t, where the model has no learned one.
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
        """Compute the mean loss of the window.

        Args:
            outputs: `anchor`, `positive`, optionally `negative`, ..., each of shape (samples,
                size), and optionally `log_temperature`, shape ().
            batch: Optionally `text_id_anchor`, `text_id_positive`, ...: int64, shape (samples,),
                equal for equal texts; 0 for a missing negative.

        Returns:
            A scalar.
        """
        scale = 1 / temperature_of(outputs, self.temperature)
        negatives = [name for name in outputs if name.startswith("negative")]
        loss = _search(outputs, batch, "anchor", ["positive", *negatives], scale)
        if not self.symmetric:
            return loss
        opposite = _search(outputs, batch, "positive", ["anchor"], scale)
        return (loss + opposite) / 2


def _search(
    outputs: Outputs, batch: Batch, column: str, candidates: list[str], scale: Tensor | float
) -> Tensor:
    """Compute the mean loss of finding, for each text of a column, the text of its own sample.

    Args:
        outputs: The vectors of each column.
        batch: The batch, with or without text ids.
        column: The column whose texts are searched for.
        candidates: The columns to search in; the first one holds the matches.
        scale: 1 / temperature.
    """
    texts = None
    if TEXT_ID + column in batch:
        ids = [batch[TEXT_ID + name] for name in candidates]
        texts = Texts(query=batch[TEXT_ID + column], match=ids[0], candidate=torch.cat(ids))
    vectors = torch.cat([outputs[name] for name in candidates])
    return cross_entropy_in_window(outputs[column], vectors, scale, texts)


@dataclass(frozen=True)
class Texts:
    """Which texts are equal, as int64 ids.

    Attributes:
        query: The id of each query, shape (n,).
        match: The id of the text that belongs to each query, shape (n,).
        candidate: The id of each candidate, shape (m,); the first n are the matches.
    """

    query: Tensor
    match: Tensor
    candidate: Tensor

    def known_matches(self, rows: Tensor) -> Tensor:
        """Find the candidates that are no negatives because of equal texts.

        Args:
            rows: Indices of queries, shape (rows,).

        Returns:
            bool, shape (rows, m); False for a query's own match.
        """
        known = self.match[rows, None] == self.candidate
        known |= self.candidate == NO_TEXT
        known[:, : len(self.query)] |= self.query[rows, None] == self.query
        known[torch.arange(len(rows), device=rows.device), rows] = False
        return known


def cross_entropy_in_window(
    queries: Tensor, candidates: Tensor, scale: Tensor | float, texts: Texts | None = None
) -> Tensor:
    """Compute the mean over queries of the cross entropy in which candidate i is the class of
    query i.

    Args:
        queries: Vectors, shape (n, size).
        candidates: Vectors, shape (m, size), m >= n.
        scale: 1 / temperature, by which the cosines are multiplied.
        texts: Ids of the texts, to leave out candidates with a text that matches the query. None:
            leave out none.

    Returns:
        A scalar.
    """

    def summed(rows: Tensor, queries: Tensor, candidates: Tensor, scale: Tensor | float) -> Tensor:
        """Add the cross entropies of some queries."""
        logits = scale * (queries[rows] @ candidates.T)
        if texts is not None:
            logits = logits.masked_fill(texts.known_matches(rows), -torch.inf)
        return F.cross_entropy(logits, rows, reduction="sum")

    with torch.autocast(queries.device.type, enabled=False):
        arguments = (unit_vectors(queries), unit_vectors(candidates), scale)
        rows = torch.arange(len(queries), device=queries.device)
        rows_per_block = max(1, NUM_ELEMENTS // len(candidates))
        blocks = rows.split(rows_per_block)
        if len(blocks) == 1:
            return summed(rows, *arguments) / len(queries)
        parts = [
            checkpoint(summed, block, *arguments, use_reentrant=False, preserve_rng_state=False)
            for block in blocks
        ]
        return torch.stack(parts).sum() / len(queries)


@dataclass(frozen=True)
class CoSENT:
    """Pairs with a higher score must have a higher cosine: only the order of the scores matters.

    loss = log(1 + sum over all pairs of samples i, j with score_i < score_j of
    exp((cos_i - cos_j) / t))

    (Huang et al. 2024, CoSENT: Consistent Sentence Embedding via Similarity Ranking.)

    Attributes:
        temperature: t.
    """

    temperature: float = 0.05

    def __call__(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Compute the loss of the window.

        Args:
            outputs: `anchor` and `positive`, shape (samples, size): the two texts of each pair.
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
            first_higher = torch.searchsorted(scores, scores, right=True)
            terms = logits + tails[first_higher]
            # The 1 in the formula.
            log_of_one = terms.new_zeros(1)
            return torch.logsumexp(torch.cat([log_of_one, terms]), 0)


@dataclass(frozen=True)
class Matryoshka:
    """The sum of a loss over several sizes of the vectors, so that their first numbers alone can be
    used as a shorter vector (Kusupati et al. 2022, Matryoshka Representation Learning).

    Attributes:
        loss: The loss of vectors of one size.
        sizes: How many of the first numbers of a vector each term uses.

    Example:
        Matryoshka(InfoNCE(), sizes=(384, 128, 64))
    """

    loss: WindowLoss
    sizes: tuple[int, ...]

    def __call__(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Compute the loss of the window.

        Args:
            outputs: The vectors that `loss` needs.
            batch: The batch that `loss` needs.

        Returns:
            A scalar.

        Raises:
            ConfigError: If a size is larger than the vectors.
        """
        total = outputs["anchor"].new_zeros(())
        for size in self.sizes:
            total = total + self.loss(shortened(outputs, size), batch)
        return total


def shortened(outputs: Outputs, size: int) -> dict[str, Tensor]:
    """Keep the first `size` numbers of each vector.

    Args:
        outputs: Vectors of shape (samples, longest), and scalars, which stay as they are.
        size: At most `longest`.

    Raises:
        ConfigError: If the vectors are shorter.
    """
    longest = outputs["anchor"].shape[-1]
    if size > longest:
        raise ConfigError(f"a Matryoshka size must be at most the vectors' {longest}, got {size}.")
    short = dict(outputs)
    for name, value in outputs.items():
        if value.dim():
            short[name] = value[..., :size]
    return short


def unit_vectors(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1, in at least float32."""
    return F.normalize(at_least_float32(vectors), dim=-1)


def temperature_of(outputs: Outputs, fixed: float) -> Tensor | float:
    """Return the model's learned temperature, or else the fixed one."""
    learned = outputs.get(LOG_TEMPERATURE)
    if learned is None:
        return fixed
    return at_least_float32(learned).exp()
