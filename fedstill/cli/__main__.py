"""`python -m fedstill.cli`."""

from fedstill.cli import main

main()
