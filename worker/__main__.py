"""`python -m worker` is `turnkeep`."""

from worker.commands.cli import main

main(prog_name="turnkeep")
