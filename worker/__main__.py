"""The program `turnkeep`, and `python -m worker`."""

import importlib.metadata
import sys


def main() -> None:
    """Run a command, beside the client that belongs to this version alone.

    The distributions of the application and of the client hold the same files: installing or removing the
    other one can change or take them (ADR 0022).
    """
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
    from .commands.cli import main as run

    run(prog_name="turnkeep")


if __name__ == "__main__":
    main()
