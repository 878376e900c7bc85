"""What a method predicts for when training data is left out. One file a method; `method.py` is the interface."""
