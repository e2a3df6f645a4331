"""Files: written atomically, checked when read."""
