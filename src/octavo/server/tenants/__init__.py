"""Who a client is, and what it may use: API keys, quotas, and metrics by tenant."""
