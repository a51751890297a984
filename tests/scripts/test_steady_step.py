"""The functions that an optimizer step runs: few frames between `train_step` and the model."""

import re

import steady_step


def test_the_model_is_at_most_four_frames_below_the_step(capsys):
    steady_step.main([])
    printed = capsys.readouterr().out
    frames = int(re.match(r"(\d+) frames of hf_ga", printed)[1])
    assert 1 <= frames <= 4
    counts = [int(count) for count in re.findall(r": (\d+) functions in", printed)]
    whole, *parts = counts
    assert len(parts) == 3
    assert sum(parts) == whole


def test_comprehensions_are_no_functions():
    profile = steady_step.Profile()

    class Frame:
        f_back = None

    frame = Frame()
    frame.f_code = compile("[x for x in ()]", f"{steady_step.PACKAGE}/a.py", "eval")
    assert frame.f_code.co_name == "<module>"
    profile(frame, "call", None)
    assert profile.functions == set()
    frame.f_code = (lambda: 0).__code__.replace(co_filename=f"{steady_step.PACKAGE}/a.py")
    profile(frame, "call", None)
    assert len(profile.functions) == 1
