"""stdlib logging, set up once a process."""

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(level: int = logging.INFO) -> None:
    root = logging.getLogger("skyrl_actors")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        root.addHandler(handler)
        root.setLevel(level)
        root.propagate = False
