"""Ground truth as a folder: of others, ours for others, and banks to compete on without a GPU or a retrain.

`python -m bench.truth --help` has the commands; `folder.py` the format, `scores.py` the LDS of
anybody's scores against such a folder (`python -m bench.lds --ground-truth DIR --scores FILE`).
"""
