"""``python -m cleave``: the program ``cleave``."""

import sys

from cleave.cli import main

if __name__ == "__main__":
    sys.exit(main())
