"""``python -m cleave --cmake-dir``: where find_package(cleave) finds the C++ library."""

import sys
from pathlib import Path


def main() -> int:
    if sys.argv[1:] == ["--cmake-dir"]:
        print(Path(__file__).parent / "share" / "cmake" / "cleave")
        return 0
    print("usage: python -m cleave --cmake-dir", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
