"""Reading a loss without keeping the activations of its forward."""

import helpers as h
import torch
from peak_memory import peak_bytes
from torch.autograd.graph import saved_tensors_hooks

from hf_ga.engine.light_graph import LightGraph
from hf_ga.loss import read_terms

SAMPLES = h.token_samples(16)


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_it_reads_as_from_a_whole_graph_and_keeps_little():
    model = h.gpt2()
    batch = h.pad_right(SAMPLES)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        (term,) = read_terms(model(**batch).loss, num_samples=16)
    expected = (float(term.divisor), float(term.count()))
    graph = LightGraph()

    def compute():
        (term,) = read_terms(model(**batch).loss, num_samples=16)
        return float(term.divisor), float(term.count())

    assert graph.run(compute) == expected
    num_forwards = []
    handle = model.register_forward_hook(lambda *_: num_forwards.append(1))
    assert graph.run(compute) == expected
    handle.remove()
    assert len(num_forwards) == 1, "it knows what to keep"
    needed = [kept[number] for number in graph._needed]
    activations = [t for t in kept if not isinstance(t, torch.nn.Parameter)]
    assert num_bytes(needed) < num_bytes(activations) / 20


def test_it_takes_no_more_memory_than_without_a_graph():
    """Also in the first forward, which is run again. Control: with a whole graph."""
    model = h.gpt2()
    batch = h.pad_right(SAMPLES)
    graph = LightGraph()

    def compute():
        outputs = model(**batch)
        (term,) = read_terms(outputs.loss, num_samples=16)
        return float(term.divisor), outputs.logits.detach()

    with torch.no_grad():
        model(**batch)
        least = peak_bytes(lambda: model(**batch))
    whole = peak_bytes(compute)
    assert whole > 2 * least
    for _ in range(2):
        assert peak_bytes(lambda: graph.run(compute)) < 1.2 * least


def test_its_own_error_is_raised():
    def compute():
        raise ZeroDivisionError

    graph = LightGraph()
    try:
        graph.run(compute)
    except ZeroDivisionError:
        return
    raise AssertionError
