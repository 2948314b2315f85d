"""How models write tool calls and reasoning into their text: formats as data, and one streaming parser for all."""
