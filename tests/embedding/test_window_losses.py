"""InfoNCE, CoSENT and Matryoshka against loops over single pairs, in float64."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from hf_ga.embedding import losses
from hf_ga.embedding.losses import CoSENT, InfoNCE, Matryoshka, excluded_candidates
from hf_ga.errors import ConfigError

TEMPERATURE = 0.2
NEGATIVES = ("negative", "negative_1")


def vectors(number=9, size=6, columns=("anchor", "positive", *NEGATIVES), dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(number, size, generator=generator, dtype=dtype).requires_grad_()
        for name in columns
    }


def cosine(first, second):
    return (first @ second / (first.norm() * second.norm())).item()


def info_nce(queries, matches, others, temperature, known):
    """The mean over queries of -log of the share of the match, one query after the other.

    Args:
        known: (query, place) -> whether the candidate at this place is no negative.
    """
    candidates = [*matches, *others]
    terms = []
    for i, query in enumerate(queries):
        weights = [math.exp(cosine(query, c) / temperature) for c in candidates]
        kept = [w for k, w in enumerate(weights) if k == i or not known(i, k)]
        terms.append(-math.log(weights[i] / sum(kept)))
    return sum(terms) / len(terms)


def never(query, place):
    return False


def relative(found, expected):
    return abs(float(found.detach()) - expected) / abs(expected)


def test_two_pairs_by_hand():
    """cos = 1 with the own positive and 0 with the other, t = 1: -log(e / (e + 1))."""
    pairs = {"anchor": torch.eye(2), "positive": 3 * torch.eye(2)}
    expected = -math.log(math.e / (math.e + 1))
    assert relative(InfoNCE(temperature=1.0)(pairs, {}), expected) < 1e-6


def test_positives_and_negatives_of_all_samples():
    outputs = vectors()
    others = [v for name in NEGATIVES for v in outputs[name]]
    expected = info_nce(outputs["anchor"], outputs["positive"], others, TEMPERATURE, never)
    assert relative(InfoNCE(TEMPERATURE)(outputs, {}), expected) < 1e-12
    own_only = {name: outputs[name] for name in ("anchor", "positive")}
    assert relative(InfoNCE(TEMPERATURE)(own_only, {}), expected) > 0.1


def test_symmetric():
    outputs = vectors(columns=("anchor", "positive"))
    anchors = outputs["anchor"]
    positives = outputs["positive"]
    forth = info_nce(anchors, positives, [], TEMPERATURE, never)
    back = info_nce(positives, anchors, [], TEMPERATURE, never)
    found = InfoNCE(TEMPERATURE, symmetric=True)(outputs, {})
    assert relative(found, (forth + back) / 2) < 1e-12
    assert relative(InfoNCE(TEMPERATURE)(outputs, {}), (forth + back) / 2) > 1e-3


# Rows 0 and 1 have the same anchor, rows 2 and 3 the same positive; the negative of row 4 is the
# positive of row 5, and rows 6 and 7 have no negative.
IDS = {
    "text_id_anchor": torch.tensor([10, 10, 12, 13, 14, 15, 16, 17]),
    "text_id_positive": torch.tensor([20, 21, 22, 22, 24, 25, 26, 27]),
    "text_id_negative": torch.tensor([30, 31, 32, 33, 25, 35, 0, 0]),
}
KNOWN = {(0, 1), (1, 0), (2, 3), (3, 2), (5, 8 + 4)}
KNOWN |= {(query, 8 + row) for query in range(8) for row in (6, 7)}


@pytest.mark.parametrize("symmetric", [False, True])
def test_equal_texts_are_no_negatives(symmetric):
    outputs = vectors(number=8, columns=("anchor", "positive", "negative"))
    anchors, positives, negatives = outputs.values()
    expected = info_nce(
        anchors, positives, negatives, TEMPERATURE, lambda query, place: (query, place) in KNOWN
    )
    if symmetric:
        back = info_nce(
            positives, anchors, [], TEMPERATURE, lambda query, place: (query, place) in KNOWN
        )
        expected = (expected + back) / 2
    loss = InfoNCE(TEMPERATURE, symmetric)
    assert relative(loss(outputs, IDS), expected) < 1e-12
    assert relative(loss(outputs, {}), expected) > 0.01


def gradients(loss, outputs):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(outputs.values()))])


def saved_elements(function):
    """The largest tensor that a backward keeps."""
    sizes = []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = function()
    return loss, max(sizes)


def test_blocks_of_rows_give_the_same_and_keep_no_matrix(monkeypatch):
    """In one block, the backward keeps the whole matrix of similarities."""
    outputs = vectors(number=64, columns=("anchor", "positive"))
    ids = {
        "text_id_anchor": torch.arange(64) // 2 + 1,
        "text_id_positive": torch.arange(64) // 3 + 1,
    }
    whole, in_one = saved_elements(lambda: InfoNCE(TEMPERATURE, True)(outputs, ids))
    expected = gradients(whole, outputs)
    monkeypatch.setattr(losses, "NUM_ELEMENTS", 64 * 5)
    split, in_blocks = saved_elements(lambda: InfoNCE(TEMPERATURE, True)(outputs, ids))
    assert in_one >= 64 * 64
    assert in_blocks <= 64 * 6
    assert torch.allclose(split, whole, rtol=1e-13)
    assert torch.allclose(gradients(split, outputs), expected, rtol=1e-11, atol=1e-15)


def test_a_learned_temperature_has_the_gradient_of_a_difference_quotient():
    outputs = vectors(columns=("anchor", "positive"))

    def loss(log_temperature):
        return InfoNCE()({**outputs, "log_temperature": log_temperature}, {})

    at = torch.tensor(math.log(TEMPERATURE), dtype=torch.float64, requires_grad=True)
    assert relative(loss(at), float(InfoNCE(TEMPERATURE)(outputs, {}).detach())) < 1e-14
    (found,) = torch.autograd.grad(loss(at), at)
    step = 1e-5
    with torch.no_grad():
        expected = float(loss(at + step) - loss(at - step)) / (2 * step)
    assert relative(found, expected) < 1e-8


def cosent(outputs, scores, temperature):
    cosines = [cosine(a, p) for a, p in zip(outputs["anchor"], outputs["positive"], strict=True)]
    total = sum(
        math.exp((cosines[i] - cosines[j]) / temperature)
        for i, low in enumerate(scores)
        for j, high in enumerate(scores)
        if low < high
    )
    return math.log(1 + total)


def test_cosent():
    """Only the order of scores counts; pairs with equal scores are not compared."""
    outputs = vectors(columns=("anchor", "positive"))
    scores = [3.0, 1.0, 1.0, 4.0, 2.0, 2.0, 2.0, 5.0, -1.0]
    expected = cosent(outputs, scores, TEMPERATURE)
    loss = CoSENT(TEMPERATURE)
    batch = {"score": torch.tensor(scores)}
    assert relative(loss(outputs, batch), expected) < 1e-12
    assert relative(loss(outputs, {"score": batch["score"] * 10}), expected) < 1e-12
    assert relative(loss(outputs, {"score": -batch["score"]}), expected) > 0.1
    constant = loss(outputs, {"score": torch.ones(9)})
    assert constant == 0
    assert gradients(constant, outputs).abs().max() == 0


def test_matryoshka_is_the_sum_over_sizes():
    outputs = vectors()
    found = Matryoshka(InfoNCE(TEMPERATURE), sizes=(6, 3, 2))(outputs, {})
    others = [outputs[name] for name in NEGATIVES]
    expected = 0.0
    for size in (6, 3, 2):
        short = [v[:size] for column in others for v in column]
        anchors, positives = (outputs[name][:, :size] for name in ("anchor", "positive"))
        expected += info_nce(anchors, positives, short, TEMPERATURE, never)
    assert relative(found, expected) < 1e-12
    with pytest.raises(ConfigError, match="at most the vectors' 6, got 7"):
        Matryoshka(InfoNCE(), sizes=(7,))(outputs, {})


def test_half_precision_is_compared_in_float32():
    """Also under autocast, which would round the similarities to 8 bits."""
    outputs = vectors(columns=("anchor", "positive"), dtype=torch.bfloat16)
    exact = {name: value.detach().double() for name, value in outputs.items()}
    expected = float(InfoNCE(TEMPERATURE)(exact, {}))
    with torch.autocast("cpu", torch.bfloat16):
        assert relative(InfoNCE(TEMPERATURE)(outputs, {}), expected) < 1e-6
        rounded = normalize(outputs["anchor"].float()) @ normalize(outputs["positive"].float()).T
        control = torch.nn.functional.cross_entropy(rounded / TEMPERATURE, torch.arange(9))
    assert relative(control, expected) > 1e-5


def test_the_same_values_as_sentence_transformers():
    package = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    outputs = vectors(number=37, size=24)
    columns = list(outputs.values())
    theirs = package.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings(columns, None)
    ours = InfoNCE(0.05)(outputs, {})
    assert relative(ours, float(theirs.detach())) < 1e-12
    assert torch.allclose(gradients(ours, outputs), gradients(theirs, outputs), rtol=1e-10)
    pair = {name: outputs[name] for name in ("anchor", "positive")}
    scores = torch.arange(37) % 5
    theirs = package.CoSENTLoss(None).compute_loss_from_embeddings(columns[:2], scores.double())
    ours = CoSENT(0.05)(pair, {"score": scores})
    assert relative(ours, float(theirs.detach())) < 1e-12
    assert torch.allclose(gradients(ours, pair), gradients(theirs, pair), rtol=1e-10)


def test_a_known_match_is_never_the_own_one():
    ids = torch.tensor([1, 1, 1])
    known = excluded_candidates(torch.tensor([0, 2]), ids, ids)
    assert known.tolist() == [[False, True, True], [True, True, False]]
    outputs = {"anchor": torch.eye(3), "positive": torch.eye(3)}
    one = InfoNCE(1.0)(outputs, {"text_id_anchor": ids, "text_id_positive": ids})
    assert one == 0  # each query has its own match alone
