"""What the user runs: compares what the methods predict (`baselines`) with what really happens (`retrain`)."""
