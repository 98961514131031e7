"""`python -m fedtools` is `fedtools`."""

from fedtools.cli import main

main()
