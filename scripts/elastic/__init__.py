"""Machines come and go during one run: torch's launchers, random events, and a ledger of the
samples that every update was computed from. `scripts/kill_test.py --elastic` runs it.
"""
