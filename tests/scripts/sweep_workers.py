"""What the workers of a test of the sweep run, in a module of its own that imports nothing heavy: each starts a new process."""

import os
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace


def serve_strange_heads(connection: Connection) -> None:
    """Heads that kill the process, hang, or are fine."""
    connection.send("ready")
    while True:
        head = connection.recv()
        if head.class_name == "kills":
            os._exit(3)
        if head.class_name == "hangs":
            time.sleep(60)
        connection.send(SimpleNamespace(class_name=head.class_name, status="right", reason=""))
