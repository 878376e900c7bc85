"""Every figure and table of the paper that the records allow, a file a kind; `python -m bench.figures` draws them."""
