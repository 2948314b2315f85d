"""What is chosen by running a model over text: scales of a KV cache, and a codec for each layer."""
