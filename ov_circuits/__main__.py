"""``ov-circuits`` and ``python -m ov_circuits``, with which torchrun can start the same commands."""

import signal


def main() -> None:
    """Entry point of ``ov-circuits``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C while the commands are imported ends the process without a word: there is nothing to take away yet.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ov_circuits.cli import main as run

    run()


if __name__ == "__main__":
    main()
