"""One file a task; the file's name is its name on the command line. `retrain/task.py` is the interface."""
