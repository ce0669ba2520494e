"""The kvist command."""


def main() -> int:
    """Return the exit code."""
    return 0
