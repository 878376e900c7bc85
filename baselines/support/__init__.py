"""What several methods share. Not methods: a method's folder has a `method.py`."""
