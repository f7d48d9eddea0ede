"""`python -m practicum` is the command line."""

from practicum.cli import main

main()
