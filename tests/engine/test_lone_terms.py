from hf_ga.engine.checks.lone_terms import NUM_WINDOWS, LoneTerms, present_terms


def test_a_term_that_this_process_never_computes_is_warned_of_once(caplog):
    terms = LoneTerms()
    for _ in range(NUM_WINDOWS - 1):
        terms.note(["a"], ["a", "b"])
    terms.note(["a", "b"], ["a", "b"])  # it was missing by chance
    for _ in range(NUM_WINDOWS - 1):
        terms.note(["a"], ["a", "b"])
    assert not caplog.records
    for _ in range(3):
        terms.note(["a"], ["a", "b"])
    (record,) = caplog.records
    assert "this process had no part of a term" in record.message


def test_terms_that_any_process_has():
    assert present_terms(["a", "b"], [2.0, 1, 1, 0, 0, 0, 9, 9, 9]) == ["a"]
