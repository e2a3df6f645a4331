"""The words of a study's page."""
