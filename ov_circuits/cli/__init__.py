"""The command line: parse, call, print.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 a check of ``verify`` failed,
2 something the user can mend (one sentence says what); 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP, 141 by a closed
pipe. Everything heavy is imported inside the command that needs it: ``ov-circuits --help`` answers without torch.

The commands are in :mod:`.pages`, :mod:`.weights`, :mod:`.prompts` and :mod:`.checkpoints`. Each reads what it is given with
:mod:`.options` and :mod:`.arguments`, opens its model with :mod:`.opening`, and hands its result out with :mod:`.output`;
:mod:`.app` puts them together.
"""

from ov_circuits.cli.app import app, main

__all__ = ["app", "main"]
