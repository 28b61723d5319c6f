"""`python -m worker` is `turnkeep`."""

from .cli import main

main(prog_name="turnkeep")
