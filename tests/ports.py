"""A port for a server of a test."""

import random
import socket


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago.

    It lies below the ports that systems give to outgoing connections (Linux: from 32768, others: from 49152), so
    that none of the many connections of the tests beside this one takes it before it is used.
    """
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with socket.socket() as bound:
            try:
                bound.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port of 100 between 20000 and 32768 is free")
