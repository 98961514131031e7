"""Commands, registered with `fedtools.cli.app`."""
