"""Answers of all APIs: running a body's prompts on the engine, and what the model wrote in the form of each API."""
