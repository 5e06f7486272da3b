"""`python -m pbkern` is the `pbkern` command."""

import sys

from pbkern.cli.main import main

sys.exit(main())
