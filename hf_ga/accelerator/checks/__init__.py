"""What a user's loop must not do, and what is said about it.

In: the loop's calls. Out: nothing, a warning (notices.py) or an error (misuse.py). Begin with
window_checks.py, for what changes between the backwards of a window; by_hand.py has loops that
divide their loss and step their optimizer by themselves, schedules.py learning rate schedules.
"""
