"""The entry point of `octavo` and of `python -m octavo`. It imports the command line only once Ctrl-C is handled."""

import signal
import sys


def main() -> int:
    """Run the command of `sys.argv` and return its exit code.

    Ctrl-C ends the process at once and in silence while the command line is imported, instead of raising
    `KeyboardInterrupt` in the middle of an import. Where SIGINT is ignored (`nohup`, a background job), it stays so.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli import main as run_command

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
