"""Looking at a model: traces of its memories, the report of a run, the page of `expire-span view` and its server."""
