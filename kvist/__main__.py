"""`python -m kvist` is the `kvist` command."""

import sys

from kvist.cli import main

sys.exit(main())
