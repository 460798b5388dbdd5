"""``python -m polyconv`` is the ``polyconv`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
