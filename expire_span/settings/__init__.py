"""Settings: frozen dataclasses of runs, tasks, models and training, read without torch."""
