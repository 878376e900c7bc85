"""The gate: has an attribution method become worse, or dearer, than its recorded baseline? Exit 1 if so.

    python -m bench.regress                                          # every method with a baseline, about a minute
    python -m bench.regress --methods ekfac@damping=1e-4 --against ekfac                   # a variant of one
    python -m bench.regress --methods mypkg.mymodule:MyMethod --baseline gate --update     # record a method of yours
    python -m bench.regress --methods mypkg.mymodule:MyMethod --baseline gate              # and gate it from then on

A baseline holds, for an embedded task, the base model's weights and the retrained losses (so the gate never retrains)
and, for each method, the scores of several seeds; the suite's own is in the package. A run scores every method anew,
with a seed of its own, at the same weights, and makes these checks:

- `finite`: no score is NaN or infinite.
- `zeros`: the share of scores that are exactly 0 is at most ZERO_MARGIN above the baseline's. A zero is what a lost
  example looks like.
- `agreement`: correlation with the baseline's scores averaged over its seeds, mean over queries. LDS forgives a noisy
  method much; this does not: one minus the agreement is the method's own noise, which half the draws nearly double; a
  flipped sign makes it negative, shuffled indices make it 0. A run that looks noisier than the baseline's by SUSPICION
  spreads, but not beyond all chance, is repeated MORE_RUNS times, and the mean of all decides.
- `draws`: where a method reports how many posterior draws it made, at least DRAWS_SHARE of the baseline's.
- `lds`: the largest LDS that the paired 95 % interval of (new - baseline) allows, at least the baseline's mean less a
  margin, which is LDS_MARGIN or what seeds alone explain, whichever is larger.
- `lds-normalised`: the same for train-normalised scores, by the spread between seeds.
- `cost`: processor seconds and wall seconds, both in units of calibration kernels that run before, during and after the
  method in the same thread, at most COST_RATIO times the baseline's; what takes less than COST_SLACK seconds beyond the
  baseline is never a miss. On a miss the method is timed up to COST_REPEATS times more. Only a timing on a quiet
  machine can fail it: while others have the processor a miss is a warning that says so (`bench/regress/clock.py`).
  `--cost warn` makes every miss a warning.

What seeds explain is Student's prediction limit for one more value, at TAIL probability a check. Changed versions or
options are a warning, not a failure. `--junit FILE` writes JUnit XML. The limits are constants of
`bench/regress/gate.py`.
"""
