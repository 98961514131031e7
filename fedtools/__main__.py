"""Run `fedtools` as `python -m fedtools`."""

from fedtools.cli import main

main()
