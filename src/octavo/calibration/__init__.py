"""Choices made by running a model over text: the scales of a KV cache, and a codec for each layer."""
