"""The terminal program `engine-client`: a few commands over `AsyncLLM`."""


def main() -> None:
    """Entry point of the console script. Exits 0, 1 after a fault, 2 for wrong usage, 130 after
    Ctrl-C."""
    import sys

    from frontend.cli.app import run_command_line

    sys.exit(run_command_line(sys.argv[1:]))
