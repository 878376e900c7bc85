"""What attribution costs as models grow: `python -m bench.scaling`. Figures and estimates of it need no torch."""
