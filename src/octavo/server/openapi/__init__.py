"""The description of the HTTP API at /openapi.json, and the page that shows it."""
