"""What a command answers to what cannot be: the two lines that every package shares."""


class UsageError(ValueError):
    """The user asked for something that cannot be: one line on stderr, exit code 2."""


def error_line(error: BaseException, limit: int = 1000) -> str:
    """An exception as one line: its type, and its words with every line break folded."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}" if text else type(error).__name__
