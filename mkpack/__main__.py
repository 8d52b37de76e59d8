"""`python -m mkpack`."""

from mkpack.cli import main

main()
