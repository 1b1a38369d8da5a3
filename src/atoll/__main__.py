"""`python -m atoll`, equivalent to `atoll`."""

from atoll.cli.main import main

main()
