"""The model that ships with the package: a run folder of weights alone, which every command that takes a run reads.

wikibooks/
  config.json      settings of the model and of the run that trained it
  checkpoints/     one checkpoint: weights alone, matrices in half precision; loading gives float32
  result.json      score and live memories of the weights as they are here
  sample.txt       a stretch of the test data, for the page
  README.md        the card: data, recipe, score, live memory

`expire-span ship RUN --out FOLDER` makes such a folder of any run of text.
"""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parent / "wikibooks"
"""Folder of the model that ships with the package: bytes of English Wikipedia and of public-domain books."""
SAMPLE = "sample.txt"
"""Name of the file in a run folder from which a sample is read where the data itself is elsewhere."""
