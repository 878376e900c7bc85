"""Looking at scores: `python -m bench.inspect examples` (training examples that matter) and `... tokens`."""
