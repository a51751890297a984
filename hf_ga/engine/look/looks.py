"""Looks: windows that are computed once more, with a rehearsal, because they showed something new.

That is a loss of a new form, terms of which no micro-batch has all, or samples that were compared
in one padded width only.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import Node

from hf_ga.engine.gradient import WindowGradient
from hf_ga.engine.look.recorder import widths_of
from hf_ga.engine.look.rehearsal import Rehearsal
from hf_ga.engine.slots import Slot
from hf_ga.engine.sums.readings import Reading, TermKey
from hf_ga.errors import LossNotAdditive
from hf_ga.loading.batches import structure_of
from hf_ga.logs import get_logger

logger = get_logger(__name__)

# At micro-batches that lack a term: which of their samples are rehearsed decides what is seen.
LOOKS_AT_MISSING_TERM = 3
MAX_LOOKS = 20  # at losses of new forms, in a run
NUM_FORM_NODES = 24  # of the graph of a loss, that are compared with those of a rehearsed one
NO_POSITIONS = np.empty(0, np.int64)


@dataclass
class MicroBatchTerms:
    """The terms of a micro-batch's losses.

    Attributes:
        kind: What its batch has.
        positions: Its samples.
        is_tried: Whether one of them is rehearsed.
        names: The terms in words.
        is_keyed: Whether no draw was torch's own, which may be others in another attempt.
        number: How many terms were read, of which two may have one key if `has_keys` is not so.
        has_keys: Whether the terms were read without speed-ups that were given up.
    """

    kind: Hashable
    positions: np.ndarray
    is_tried: bool
    names: dict[TermKey, str] = field(default_factory=dict)
    is_keyed: bool = True
    number: int = 0
    has_keys: bool = True

    @property
    def keys(self) -> Set[TermKey]:
        """The terms."""
        return self.names.keys()


class Looks:
    """Decides which windows of a run are looked at, and at which samples.

    Attributes:
        is_due: Whether the next attempt of a window is a look: it is rehearsed, whichever window it
            is, and computed once more as it was planned.
        is_on: Whether the current attempt is one.
        positions: Positions of samples that a look rehearses.
    """

    def __init__(self) -> None:
        """Start before the first window."""
        self.is_due = False
        self.is_on = False
        self.positions = NO_POSITIONS
        self._may_ask = False  # in this window
        self._num_looks = 0
        self._tries_widths = False  # in the current look
        self._forms: set[Hashable] = set()  # of losses that were tried
        self._looked_at: set[Hashable] = set()  # those that the current look is for
        self._terms_of_kind: dict[Hashable, set[TermKey]] = {}  # of batches, in all windows so far
        self._attempted: dict[tuple[int, ...], MicroBatchTerms] = {}  # in this window's attempts
        self._forget_window()

    def _forget_window(self) -> None:
        """Forget what is known about the current window."""
        self._untried: dict[Hashable, np.ndarray] = {}  # form -> its samples
        self._terms_of: dict[int, MicroBatchTerms] = {}  # of its micro-batches
        self._rehearsed_positions: set[int] = set()
        self._first_positions: dict[TermKey, int] = {}  # of a sample with each term
        # (width, positions, terms, loss) of its micro-batches.
        self._losses: list[tuple[float, np.ndarray, Set[TermKey], Tensor]] = []

    def begin_window(self, *, is_rehearsed: bool, may_ask: bool) -> None:
        """Begin a window, or begin it again.

        Args:
            is_rehearsed: Whether it is rehearsed.
            may_ask: Whether it may be computed again with a rehearsal.
        """
        self.is_on = is_rehearsed and self.is_due
        self._may_ask = may_ask
        self._forget_window()

    def has_rehearsed(self, positions: Sequence[int]) -> bool:
        """Whether a sample at one of these positions is rehearsed in this window."""
        return not self._rehearsed_positions.isdisjoint(positions)

    def note(
        self, loss: Tensor, readings: Sequence[Reading], slot: Slot, *, is_keyed: bool
    ) -> None:
        """Note the form of a loss: its terms, the nodes before a sum, the kind of its batch. It is
        tried if a sample of its micro-batch is rehearsed.

        Args:
            loss: The loss.
            readings: Its terms.
            slot: Its micro-batch.
            is_keyed: Whether no draw of the micro-batch so far was torch's own.
        """
        positions = slot.micro_batch.positions
        if slot.is_rehearsal:
            self._rehearsed_positions = set(positions.tolist())
        if not slot.is_counted:
            return
        kind = kind_of(slot.micro_batch.batch)
        is_tried = self.has_rehearsed(positions.tolist())
        keys = {reading.key for reading in readings}
        for key in keys:
            self._first_positions.setdefault(key, int(positions[0]))
        self._terms_of_kind.setdefault(kind, set()).update(keys)
        new = MicroBatchTerms(kind, positions, is_tried)
        terms = self._terms_of.setdefault(int(positions[0]), new)
        terms.names.update((reading.key, reading.name) for reading in readings)
        terms.is_keyed &= is_keyed
        terms.number += len(readings)
        for reading in readings if self._may_ask else ():
            form = (kind, reading.key, form_of(loss) if reading.term is None else None)
            if is_tried:
                self._forms.add(form)
            elif form not in self._forms:
                self._untried.setdefault(form, positions)

    def note_width(self, slot: Slot, terms: Set[TermKey], loss: Tensor) -> float:
        """Note how wide a micro-batch is, and return the number of elements of one sample.

        Args:
            slot: The micro-batch.
            terms: The terms of its loss of which its samples can show whether padding matters.
            loss: The loss. If it is 0, it may have no gradient, which shows nothing.
        """
        width = float(sum(size.numel() for size in widths_of(slot.micro_batch.batch)))
        if terms:
            self._losses.append((width, slot.micro_batch.positions, terms, loss.detach()))
        return width

    def _narrowest(self) -> list[np.ndarray]:
        """Return the positions of the narrowest micro-batch with each term. Waits for the loss."""
        narrowest: dict[TermKey, np.ndarray] = {}
        for _, positions, terms, loss in sorted(self._losses, key=lambda noted: noted[0]):
            if bool(loss != 0):
                narrowest = dict.fromkeys(terms, positions) | narrowest
        return list(narrowest.values())

    @property
    def lacks_terms(self) -> bool:
        """Whether a micro-batch of the window lacks a term that another one had with such a batch,
        in any window so far.
        """
        return any(self._terms_of_kind[t.kind] - t.keys for t in self._terms_of.values())

    def check_attempts(self, gradient: WindowGradient) -> None:
        """Check, at a window's end, that its micro-batches have the terms that they had in its
        earlier attempts.

        Args:
            gradient: The window's gradient.

        Raises:
            LossNotAdditive: If one has another one.
        """
        if gradient.is_misread:
            return
        key_of = gradient.same_terms.key_of
        for now in self._terms_of.values():
            before = self._attempted.setdefault(tuple(now.positions.tolist()), now)
            now.has_keys = not gradient.has_other_keys
            names = {key_of(key): name for key, name in (before.names | now.names).items()}
            changed = set(map(key_of, before.keys)) ^ set(map(key_of, now.keys))
            if not (before.has_keys and now.has_keys) and before.number == now.number:
                continue
            if changed and before.is_keyed and now.is_keyed:
                raise LossNotAdditive(
                    f"{min(names[key] for key in changed)}: a micro-batch of the window had this "
                    "term of the loss when it was computed once, but not when it was computed once "
                    "more, so the loop adds it, or passes num_targets, by what it counts, and not "
                    "by the samples. Count updates (below `if accelerator.sync_gradients:`), not "
                    "iterations, of which some windows have more."
                )

    def forget_attempts(self) -> None:
        """Forget the terms of a window that is not computed again, or whose terms were misread."""
        self._attempted = {}

    def _note_missing_terms(self, rehearsal: Rehearsal | None) -> None:
        """Note which terms micro-batches of the window lack that others with such a batch have:
        none of their samples may have a part of it, or the loop may have left them out.
        """
        for terms in self._terms_of.values():
            for key in self._terms_of_kind[terms.kind] - terms.keys:
                forms = [(terms.kind, key, look) for look in range(LOOKS_AT_MISSING_TERM)]
                untried = [form for form in forms if form not in self._forms]
                if not untried:
                    continue
                if terms.is_tried and rehearsal is not None and rehearsal.has_term(key):
                    self._forms.add(untried[0])
                else:
                    self._untried.setdefault(untried[0], terms.positions)

    def ask(self, gradient: WindowGradient, rehearsal: Rehearsal | None) -> None:
        """Before a window's end, let it be computed again with a rehearsal if its loss had a form
        that was not tried; each form gets one look.

        Args:
            gradient: The window's gradient.
            rehearsal: The window's rehearsal, if it has one.
        """
        self._note_missing_terms(rehearsal)
        self._forms |= self._looked_at
        self._looked_at = set()
        untried = {form: p for form, p in self._untried.items() if form not in self._forms}
        is_final = gradient.must_repeat is None and not gradient.must_pad and self._may_ask
        if not untried or not is_final or self.is_on or self._num_looks == MAX_LOOKS:
            return
        self._num_looks += 1
        self._looked_at = set(untried)
        self.positions = _first_half(next(iter(untried.values())))
        gradient.must_look = True
        gradient.must_repeat = "its loss has a form that was not tried yet"
        if self._num_looks == MAX_LOOKS:
            logger.warning(
                f"hf_ga: the loss had {MAX_LOOKS} forms so far (other terms, other functions, "
                "batches with other entries). Others are not tried by themselves from now on."
            )

    def follow(self, gradient: WindowGradient) -> None:
        """After a window's end, look at what all ranks have agreed on. A collective if two terms
        may be one.

        Args:
            gradient: The window's gradient, finished.
        """
        self.is_due |= gradient.must_look
        if gradient.must_try_widths:
            self._tries_widths = True
            narrowest = [_first_half(positions) for positions in self._narrowest()]
            self.positions = np.concatenate(narrowest) if narrowest else self.positions
        if gradient.undecided is not None:
            of_ranks = gradient.backend.gather_objects(self._first_positions)
            known = {key: position for of_rank in of_ranks for key, position in of_rank.items()}
            self.positions = np.array([known[key] for key in gradient.undecided], np.int64)

    def end(self) -> bool:
        """End a look, and return whether it was for samples of another width."""
        tried_widths = self._tries_widths
        self.is_due = False
        self._tries_widths = False
        self.positions = NO_POSITIONS
        return tried_widths


def _first_half(positions: np.ndarray) -> np.ndarray:
    """Return the positions of half of the samples of a micro-batch: others keep them company."""
    return positions[: (len(positions) + 1) // 2]


def form_of(loss: Tensor) -> Hashable:
    """Return the names of the nodes that compute a loss, from the last one on, as far as
    `NUM_FORM_NODES`: what a loss function does differently for other data shows there.
    """
    queue = deque([loss.grad_fn])
    seen: set[Node] = set()
    names = []
    while queue and len(names) < NUM_FORM_NODES:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        queue.extend(child for child, _ in node.next_functions)
    return tuple(names)


def kind_of(batch: Any) -> Hashable:
    """Return the names of a batch's entries, and what they are: types, number of dims."""
    return structure_of(batch) if isinstance(batch, Mapping) else type(batch)
