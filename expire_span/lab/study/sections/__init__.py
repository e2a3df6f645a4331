"""The sections of the studies' pages: their text, pictures and tables."""
