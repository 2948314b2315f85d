"""Tool calls and reasoning in models' text: formats as data, and one streaming parser for all."""
