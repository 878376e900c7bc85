"""What a method predicts would happen when training data is left out. One file a method; `method.py` is the interface."""
