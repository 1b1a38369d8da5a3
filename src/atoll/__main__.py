"""`python -m atoll` is `atoll`."""

from atoll.cli.main import main

main()
