"""So that `python -m expire_span`, `accelerate launch -m expire_span` and torchrun work."""

import sys

from expire_span.cli import main

sys.exit(main())
