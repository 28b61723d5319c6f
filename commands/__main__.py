"""The program `turnkeep`, and `python -m commands`."""

import os
import sys

from .interrupts import importing


def main() -> None:
    """Check that the installed client files have the same version, then run a command.

    The packages `turnkeep` and its client contain the same client files. So installing or removing the client
    package can replace or delete files of the application (ADR 0022).
    """
    with importing():
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # it was closed, as by `<&-`
                opened = open(os.devnull, mode)  # noqa: PTH123, SIM115  # for the whole process
                setattr(sys, name, opened)
                os.set_inheritable(opened.fileno(), True)  # it has the number of the closed one
        import importlib.metadata

        version = importlib.metadata.version("turnkeep")
        try:
            from turnkeep_client import __version__ as client_version
        except ImportError:
            client_version = "missing"
        if client_version != version:
            sys.exit(
                f"turnkeep: its package turnkeep_client is {client_version} and must be {version};"
                f" install turnkeep {version} again, with pip install --force-reinstall --no-deps"
            )
        from .cli import main as run
    run(prog_name="turnkeep")


if __name__ == "__main__":
    main()
