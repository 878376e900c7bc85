"""Evaluations beside LDS, each a module here: removal, mislabel, calibration, leave_one_out, agreement, limit.

    python -m bench.evaluations removal --task digits       # or: tda-bench evaluate removal --task digits

`common.py` has what they share: arguments, every method's scores, the result and its record.
"""
