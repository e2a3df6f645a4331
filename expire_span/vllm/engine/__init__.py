"""The part that is written against vLLM's interfaces: cache spec, attention backend, model, settings and scheduler."""
