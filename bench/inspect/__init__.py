"""Looking at scores: `tda-bench inspect` (training examples that matter to a query) and `tda-bench inspect tokens`."""
