"""``python -m ov_circuits``: the same commands, so that torchrun can start them."""

from ov_circuits.cli import main

main()
