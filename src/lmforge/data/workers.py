"""Loader workers under signals meant for the whole process group, as schedulers, terminals and `timeout` send them."""

import os
import signal
import threading

SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})


def outlast_signals(worker: int) -> None:
    """Make this worker outlive a SIGTERM or SIGUSR1 of anybody but its parent, which still has to finish its step.

    The parent's own SIGTERM must end it: multiprocessing sends one at exit and then waits without limit, so ignoring
    the signal altogether could hang. Only a thread that waits for the signal learns who sent it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_end_for_parent, args=(os.getppid(),), name="signals", daemon=True).start()


def _end_for_parent(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)
