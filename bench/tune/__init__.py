"""Choosing settings, and what LDS depends on: `python -m bench.tune`, `... sweep`, `... budget`.

`choose.py` has the rule by which settings are chosen, `sweep.py` grids and budget curves, `grid.py` what they share.
"""
