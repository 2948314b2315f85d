"""Bodies of all APIs: their fields and bounds, reading them off the event loop, and turning them into prompts."""
