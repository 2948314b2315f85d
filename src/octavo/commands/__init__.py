"""The commands of `octavo`, looked up by name.

A new command is a module with a docstring, `DESCRIPTION`, `add_arguments(parser)` and `run(args)`, and a line here. Its
module is imported when the command is used or its shell completion is written, so it imports numpy, torch and what
needs them inside functions.
"""

COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "route": "send each request to the server that has its prompt cached",
    "chat": "chat with a model in the terminal",
    "generate": "complete prompts offline; results as JSON lines",
    "top": "watch a server's cache and requests in the terminal",
    "plan": "compute the memory that a model and its KV cache need",
    "simulate": "estimate a service's latency and throughput",
    "bench": "measure an engine or a server",
    "quality": "measure what a codec of the KV cache costs in quality",
    "calibrate": "choose a KV cache's scales, or a codec for each layer, by running text",
    "calibrate-speed": "measure step times on this machine, for octavo simulate",
    "cache": "inspect, verify or delete prefixes on disk",
    "completion": "write a shell's completion script",
}
"""Name and summary of each command, in the order of `octavo --help`."""
