"""`python -m pbkern` is the `pbkern` command."""

import sys

from .cli import main

sys.exit(main())
