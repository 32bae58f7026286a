"""`python -m miles` is the same command as `miles`."""

import sys

from miles.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
