#!/usr/bin/env python3
"""The seed's benchmark: ``MODEL_PATH=/path/to/model python3 bench.py [seq]``."""

import sys

from cleave.seed_bench import main

if __name__ == "__main__":
    sys.exit(main())
